"""A dense network and experts side by side, each with norms of its own (Gemma 4).

The experts and their router read the residual stream itself.
"""

from __future__ import annotations

from torch import Tensor

from palestra.model.block_ops import BlockOps
from palestra.model.loading.layer_spec import ExpertsSpec
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weights import ParallelWeights
from palestra.model.lora.linear import LoraPlan
from palestra.model.mlp.activations import activation
from palestra.model.mlp.dense import DenseMlp
from palestra.model.mlp.experts import ExpertsMlp
from palestra.model.mlp.routing import Routing


class ParallelMlp:
    def __init__(self, n: int, spec: ModelSpec, experts: ExpertsSpec, weights: ParallelWeights, ops: BlockOps):
        self.spec, self.weights, self.ops = spec, weights, ops
        self.dense = DenseMlp(n, weights.dense, activation(experts.activation, ops), kind="shared_")
        self.experts = ExpertsMlp(n, experts, weights.experts, ops)

    def __call__(self, hidden: Tensor, plan: LoraPlan, routing: Routing | None = None) -> Tensor:
        w = self.weights
        dense = self._norm(self.dense(self._norm(hidden, w.dense_norm), plan), w.dense_out_norm)
        seen = self._norm(hidden, w.router_norm)
        visited = self.experts(self._norm(hidden, w.experts_norm), plan, routing, seen_by_router=seen)
        return dense + self._norm(visited, w.experts_out_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.add_rms_norm(x, None, weight, self.spec.norm_eps)[1]
