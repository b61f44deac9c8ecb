"""Softmax attention of a layer: projections, heads, and the gate on what they return.

Owns: what is around attention. Never touches: who sees whom, the KV cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from palestra.model.attention.rope import Angles
from palestra.model.block_ops import BlockOps
from palestra.model.loading.layer_spec import AttentionSpec
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weights import AttentionWeights
from palestra.model.lora.linear import LoraPlan, lora_linear
from palestra.model.mixers.inputs import MixerInputs


class AttentionMixer:
    def __init__(self, n: int, spec: ModelSpec, mixer: AttentionSpec, weights: AttentionWeights, ops: BlockOps):
        self.n, self.spec, self.weights, self.ops = n, spec, weights, ops
        self.is_gated, self.rope = mixer.is_gated, mixer.rope
        self.query_scale = 1.0 if mixer.scale is None else mixer.scale * spec.head_dim**0.5
        self.heads = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)

    def __call__(self, x: Tensor, inputs: MixerInputs, plan: LoraPlan) -> Tensor:
        w, n = self.weights, self.n
        qkv, gate = lora_linear(x, w.qkv, w.qkv_bias, (n, "qkv"), plan), None
        if self.is_gated:
            qkv, gate = self._split_gate(qkv)
        if w.row_norms is not None:
            qkv = self._norm_rows(qkv, *w.row_norms)
        angles = inputs.angles[self.rope]
        q, k, v = self.ops.rotate_heads(qkv, w.qk_norm, angles.turn, self.spec.norm_eps, self.heads)
        mixed = inputs.attend(n, self._scaled(q, angles), k, v, w.sinks)
        if gate is not None:
            mixed = mixed * torch.sigmoid(gate)
        return lora_linear(mixed, w.o, w.o_bias, (n, "o"), plan)

    def _norm_rows(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """Queries and keys normalised over all of their heads."""
        q, k, v = qkv.split([self.spec.q_size, self.spec.kv_size, self.spec.kv_size], 1)
        q, k = (self.ops.add_rms_norm(x, None, w, self.spec.norm_eps)[1] for x, w in ((q, q_norm), (k, k_norm)))
        return torch.cat([q, k, v], 1)

    def _scaled(self, q: Tensor, angles: Angles) -> Tensor:
        """Attention divides scores by the square root of head_dim; what a family does instead is in the queries."""
        q = q if self.query_scale == 1.0 else q * self.query_scale
        return q if angles.query_scale is None else q * angles.query_scale

    def _split_gate(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and gates stand beside each other head by head."""
        q_size = self.spec.q_size
        q, gate = qkv[:, : 2 * q_size].unflatten(1, (self.spec.n_heads, 2, -1)).unbind(2)
        return torch.cat([q.flatten(1), qkv[:, 2 * q_size :]], 1), gate.flatten(1)
