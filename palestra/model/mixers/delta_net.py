"""Gated delta net of a layer: projections, gates, and the norm on what the recurrence returns."""

from __future__ import annotations

import torch
from torch import Tensor

from palestra.model.block_ops import BlockOps
from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weights import DeltaNetWeights
from palestra.model.lora.linear import LoraPlan, lora_linear
from palestra.model.mixers.inputs import MixerInputs


class DeltaNetMixer:
    def __init__(self, n: int, spec: ModelSpec, mixer: DeltaNetSpec, weights: DeltaNetWeights, ops: BlockOps):
        self.n, self.spec, self.mixer, self.weights, self.ops = n, spec, mixer, weights, ops

    def __call__(self, x: Tensor, inputs: MixerInputs, plan: LoraPlan) -> Tensor:
        assert inputs.recur is not None, "this model needs a recurrence"
        w, n = self.weights, self.n
        qkv = lora_linear(x, w.qkv, None, (n, "qkv"), plan)
        if w.z is None:
            qkv, z = self._split_key_heads(qkv)
        else:
            z = lora_linear(x, w.z, None, (n, "z"), plan)
        write, decay = self.ops.delta_gates(x, w.ba, w.neg_a, w.dt_bias)
        mixed = inputs.recur.scan(n, inputs.recur.convolve(n, qkv, w.conv), write, decay)
        gated = self.ops.gated_norm(mixed, z, w.norm, self.spec.norm_eps)
        return lora_linear(gated, w.out, None, (n, "o"), plan)

    def _split_key_heads(self, qkvz: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys, values and gates stand beside each other key head by key head."""
        m = self.spec.delta_nets[self.n]
        sizes = [size // m.n_key_heads for size in (m.key_size, m.key_size, m.value_size, m.value_size)]
        *qkv, z = (part.flatten(1) for part in qkvz.unflatten(1, (m.n_key_heads, -1)).split(sizes, 2))
        return torch.cat(qkv, 1), z
