"""Dense feed-forward network of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from palestra.model.block_ops import SwiGlu
from palestra.model.loading.weights import MlpWeights
from palestra.model.lora.linear import LoraPlan, lora_linear
from palestra.model.mlp.routing import Routing
from palestra.model.recomputation import is_left_out, leave_out, recomputed

LONG_ROWS = 8192
"""More rows are computed in parts of so many, so that a long sequence needs no memory for their inner states."""


class DenseMlp:
    def __init__(self, n: int, weights: MlpWeights, activate: SwiGlu, *, kind: str = ""):
        """`kind` comes before the names of its LoRA sites."""
        self.weights, self.activate = weights, activate
        self.gate_up_site, self.down_site = (n, f"{kind}gate_up"), (n, f"{kind}down")

    def __call__(self, x: Tensor, plan: LoraPlan, routing: Routing | None = None) -> Tensor:
        if len(x) <= LONG_ROWS:
            return self._run(x, plan)
        plans = plan.parts(len(x), LONG_ROWS, x.device)
        return torch.cat([self._part(*part) for part in zip(x.split(LONG_ROWS), plans, strict=True)])

    def _part(self, x: Tensor, plan: LoraPlan) -> Tensor:
        if not torch.is_grad_enabled():
            return self._run(x, plan)
        unread = {self.down_site}
        if not is_left_out(self.down_site):
            return recomputed(self._run, x, plan, unread=unread)
        with leave_out({self.gate_up_site, self.down_site}):  # the layer is computed again, and the part will be
            return recomputed(self._run, x, plan, unread=unread)

    def _run(self, x: Tensor, plan: LoraPlan) -> Tensor:
        w = self.weights
        activated = self.activate(lora_linear(x, w.gate_up, w.gate_up_bias, self.gate_up_site, plan))
        return lora_linear(activated, w.down, w.down_bias, self.down_site, plan)
