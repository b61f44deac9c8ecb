"""Mamba-2 of a layer: projections, the time step, and the gate and norm on what the state space returns."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from palestra.model.block_ops import BlockOps
from palestra.model.loading.layer_spec import MambaSpec
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weights import MambaWeights
from palestra.model.lora.linear import LoraPlan, lora_linear
from palestra.model.mixers.inputs import MixerInputs


class MambaMixer:
    def __init__(self, n: int, spec: ModelSpec, mixer: MambaSpec, weights: MambaWeights, ops: BlockOps):
        self.n, self.spec, self.mixer, self.weights, self.ops = n, spec, mixer, weights, ops

    def __call__(self, x: Tensor, inputs: MixerInputs, plan: LoraPlan) -> Tensor:
        assert inputs.recur is not None, "this model needs a recurrence"
        w, n, m = self.weights, self.n, self.mixer
        projected = lora_linear(x, w.in_proj, None, (n, "qkv"), plan)
        gate, xbc, dt = projected.split([m.inner_size, m.conv_size, m.n_heads], 1)
        dt = softplus(dt.float() + w.dt_bias)
        xbc = inputs.recur.convolve(n, xbc, w.conv, w.conv_bias)
        mixed = inputs.recur.scan(n, xbc, dt, dt * w.neg_a)
        mixed = mixed + w.skip[:, None] * xbc[:, : m.inner_size].float().view_as(mixed)
        groups = mixed.flatten(1).unflatten(1, (m.n_groups, -1))
        gated = self.ops.norm_gated(groups, gate, w.norm, self.spec.norm_eps)
        return lora_linear(gated, w.out, None, (n, "o"), plan)
