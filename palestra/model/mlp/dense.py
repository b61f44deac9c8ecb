"""Dense feed-forward network of a layer."""

from __future__ import annotations

from torch import Tensor

from palestra.model.block_ops import SwiGlu
from palestra.model.loading.weights import MlpWeights
from palestra.model.lora.linear import LoraPlan, lora_linear
from palestra.model.mlp.routing import Routing


class DenseMlp:
    def __init__(self, n: int, weights: MlpWeights, activate: SwiGlu, *, kind: str = ""):
        """`kind` comes before the names of its LoRA sites."""
        self.weights, self.activate = weights, activate
        self.gate_up_site, self.down_site = (n, f"{kind}gate_up"), (n, f"{kind}down")

    def __call__(self, x: Tensor, plan: LoraPlan, routing: Routing | None = None) -> Tensor:
        w = self.weights
        activated = self.activate(lora_linear(x, w.gate_up, w.gate_up_bias, self.gate_up_site, plan))
        return lora_linear(activated, w.down, w.down_bias, self.down_site, plan)
