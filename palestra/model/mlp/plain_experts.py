"""The experts of a layer in plain torch: forward and backward passes over pairs of a row and an expert.

Cost follows the experts that are visited. The backward pass computes activations again from what gate and up
returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from palestra.model.block_ops import SwiGlu
from palestra.model.loading.weights import ExpertsWeights
from palestra.model.lora.expert_products import ExpertLora
from palestra.model.lora.linear import LoraPlan
from palestra.model.mlp.routing import Dispatch
from palestra.model.quantised.packed import FrozenWeight, dense_stack
from palestra.model.recomputation import is_left_out


@dataclass(frozen=True)
class Experts:
    """The experts of one layer for one batch, whose rows are dispatched."""

    weights: ExpertsWeights
    activate: SwiGlu
    dispatch: Dispatch
    layer: int
    plan: LoraPlan

    @cached_property
    def lora(self) -> ExpertLora:
        return ExpertLora(self.plan.runs, self.layer, self.dispatch)

    def dense(self, weight: FrozenWeight) -> Tensor:
        """Written out for the experts that are visited; on a GPU for all, since asking which would wait for it."""
        visited = [n for n, _, _ in self.dispatch.spans] if self.dispatch.ends.device.type == "cpu" else []
        return dense_stack(weight, visited)

    def forward(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The output, and what the backward pass needs: gate and up of each pair, what adapters made inside."""
        gate_up = self.dispatch.product(x.index_select(0, self.dispatch.rows), self.dense(self.weights.gate_up).mT)
        if (bias := self.weights.gate_up_bias) is not None:
            gate_up += bias.index_select(0, self.dispatch.experts)
        up_inner = self.lora.add_gate_up(gate_up, x)
        activated = self.activate(gate_up)
        down_inner = self.lora.down_inner(activated)
        if is_left_out(self.lora.down_site):
            return torch.empty_like(x), gate_up, [*up_inner, *down_inner]
        out = self.dispatch.product(activated, self.dense(self.weights.down).mT)
        if (bias := self.weights.down_bias) is not None:
            out += bias.index_select(0, self.dispatch.experts)
        self.lora.add_down(out, down_inner)
        y = self.dispatch.sum_pairs(out, weights)
        self.lora.add_rows(y, weights, down_inner)
        return y, gate_up, [*up_inner, *down_inner]

    def inner(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """The inner products of each adapter's run: of x, and of the activated values."""
        return saved

    def backward(
        self, dy: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, saved: Sequence[Tensor], *, need_dx: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of x, if asked, and of the router's weights. But for its bias, an expert is linear in what it
        activates, so the gradient of its weight needs no output of it."""
        dispatch, n, inner = self.dispatch, len(self.lora.runs), self.inner(saved)
        with torch.enable_grad():
            gate_up = gate_up.detach().requires_grad_()
            recorded = self.activate(gate_up)
        activated = recorded.detach()
        dy_pairs = dy.index_select(0, dispatch.rows)
        d_activated = dispatch.product(dy_pairs, self.dense(self.weights.down))
        self.lora.down_backward(dy, activated, weights, inner[n:], d_activated)
        d_weights = dispatch.weigh_gradient(d_activated, activated, weights)
        if (bias := self.weights.down_bias) is not None:
            of_bias = torch.linalg.vecdot(dy_pairs.float(), bias.index_select(0, dispatch.experts).float())
            d_weights = d_weights + of_bias[dispatch.places]
        (d_gate_up,) = torch.autograd.grad(recorded, gate_up, d_activated)
        dx_pairs = dispatch.product(d_gate_up, self.dense(self.weights.gate_up)) if need_dx else None
        dx = None if dx_pairs is None else torch.zeros_like(x)
        self.lora.gate_up_backward(d_gate_up, x, inner[:n], dx, dx_pairs)
        if dx is not None and dx_pairs is not None:
            dx += dispatch.sum_pairs(dx_pairs)
        return dx, d_weights
