"""Softmax attention of a layer: projections, heads, and the gate on what they return."""

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
        self.n, self.spec, self.mixer, self.weights, self.ops = n, spec, mixer, weights, ops
        self.shape = shape = spec.heads[n]
        self.query_scale = 1.0 if mixer.is_scale_in_norm else mixer.query_factor(shape)
        self.has_keys = mixer.kv_source is None
        kv_heads = shape.n_kv_heads if self.has_keys else 0
        self.heads = (shape.n_heads, kv_heads, kv_heads)

    def __call__(self, x: Tensor, inputs: MixerInputs, plan: LoraPlan) -> Tensor:
        w, n = self.weights, self.n
        qkv, gate = lora_linear(x, w.qkv, w.qkv_bias, (n, "qkv"), plan), None
        if self.mixer.is_gated:
            qkv, gate = self._split_gate(qkv)
        if self.mixer.values_are_keys:
            qkv = torch.cat([qkv, qkv[:, self.shape.q_size :]], 1)
        if w.row_norms is not None:
            qkv = self._norm_rows(qkv, *w.row_norms)
        angles = inputs.angles[self.mixer.rope]
        q, k, v = self.ops.rotate_heads(qkv, w.qk_norm, angles.turn, self.spec.norm_eps, self.heads)
        kv = (k, self._normed(v)) if self.has_keys else (None, None)
        mixed = inputs.attend(n, self._scaled(q, angles), *kv, w.sinks)
        if gate is not None:
            mixed = mixed * torch.sigmoid(gate)
        return lora_linear(mixed, w.o, w.o_bias, (n, "o"), plan)

    def _normed(self, v: Tensor) -> Tensor:
        if self.weights.v_norm is None:
            return v
        heads = v.reshape(-1, v.shape[-1])
        return self.ops.add_rms_norm(heads, None, self.weights.v_norm, self.spec.norm_eps)[1].view(v.shape)

    def _norm_rows(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """Queries and keys normalised over all of their heads."""
        q, k, v = qkv.split([self.shape.q_size, self.shape.kv_size, self.shape.kv_size], 1)
        q, k = (self.ops.add_rms_norm(x, None, w, self.spec.norm_eps)[1] for x, w in ((q, q_norm), (k, k_norm)))
        return torch.cat([q, k, v], 1)

    def _scaled(self, q: Tensor, angles: Angles) -> Tensor:
        """Attention divides scores by the square root of head_dim; what a family does instead is in the queries."""
        q = q if self.query_scale == 1.0 else q * self.query_scale
        return q if angles.query_scale is None else q * angles.query_scale

    def _split_gate(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and gates stand beside each other head by head."""
        q_size = self.shape.q_size
        q, gate = qkv[:, : 2 * q_size].unflatten(1, (self.shape.n_heads, 2, -1)).unbind(2)
        return torch.cat([q.flatten(1), qkv[:, 2 * q_size :]], 1), gate.flatten(1)
