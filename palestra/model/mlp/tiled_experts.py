"""The experts of a layer by kernels over tiles of pairs: for half precision on a GPU.

With pairs sorted by expert, and ranks that adapters of the batch have at most,

    x [rows, width] -> t = x A^T [rows, 2 * ranks] -> gate_up [pairs, 2 * size], with t B of each expert inside
    -> activated [pairs, size] -> u = activated A^T [pairs, ranks] and out [pairs, width]
    -> y = the weighted sum of a row's pairs, and that of u times B, which all experts share

In PEFT's layout t is computed of pairs, and u B is inside of out. The sampler and the trainer take these launches
alike, and a row's bits do not depend on the rows beside it. Gradients are the plain code's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from palestra.model.kernels.experts import Inner, PairProducts
from palestra.model.kernels.lora import SiteShape
from palestra.model.mlp.plain_experts import Experts
from palestra.model.recomputation import is_left_out

if TYPE_CHECKING:
    from palestra.model.kernels.lora import ExpertTiles


class TiledExperts(Experts):
    def forward(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        assert self.dispatch.sorted is not None, "kernels sort pairs themselves"
        w, x = self.weights, x.contiguous()
        adapters = None if self.plan.products is None else self.plan.products.at_experts(self.layer)
        products = PairProducts(self.dispatch.sorted, None if adapters is None else adapters.tiles)
        gate_up_site, down_site = self._sites(adapters)
        t = None if adapters is None else self._inner(x, products, adapters)
        gate_up = products.product(x, self.dense(w.gate_up), w.gate_up_bias, gate_up_site, t, of_rows=True)
        activated, saved = self.activate(gate_up), []
        u = None if adapters is None else products.shrink(activated, down_site, of_rows=False)
        if u is not None and t is not None:
            saved = [inner for inner in (u, t.rows, t.pairs) if inner is not None]
        if is_left_out((self.layer, "down")):
            return torch.empty_like(x), gate_up, saved
        own = Inner(None, u) if adapters is not None and adapters.have_own_matrices else None
        out = products.product(activated, self.dense(w.down), w.down_bias, down_site, own, of_rows=False)
        y = self.dispatch.sum_pairs(out, weights)
        if adapters is not None and u is not None:
            adapters.tiles.expand(y, self.dispatch.sum_pairs(u, weights), down_site)
        return y, gate_up, saved

    def _inner(self, x: Tensor, products: PairProducts, adapters: ExpertTiles) -> Inner:
        is_trained, site = torch.is_grad_enabled() or self.plan.anchor is not None, adapters.gate_up
        rows = adapters.tiles.shrink(x, site) if is_trained else adapters.tiles.shrink_chunks(x, site)
        return Inner(rows, products.shrink(x, site, of_rows=True) if adapters.have_own_matrices else None)

    def _sites(self, adapters: ExpertTiles | None) -> tuple[SiteShape, SiteShape]:
        if adapters is not None:
            return adapters.gate_up, adapters.down
        (_, outputs, width), size = self.weights.gate_up.shape, self.weights.down.shape[2]
        return SiteShape(0, width, (size,) * (outputs // size)), SiteShape(0, size, (width,))

    def inner(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        if not saved:
            return []
        u, t_rows, *t_pairs = saved
        gate_up, down = [], []
        for run in self.lora.runs:
            layout = run.stack.own_layout
            ranks = layout.rank * len(layout.sites[self.lora.gate_up_site].parts)
            t = run.take(t_pairs[0]) if layout.has_own_matrices else t_rows[run.rows]
            gate_up.append(t[:, :ranks])
            down.append(run.take(u)[:, : layout.rank])
        return [*gate_up, *down]
