"""The decoder: one block for the whole Llama family.

Tokens of many sequences stand packed in one row dimension; who may see whom is the attention's business, which
adapter a row uses the LoRA plan's. Owns: the forward pass. Never touches: caches, losses, sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from palestra.model.attention import Attention
from palestra.model.lora import LoraPlan, lora_linear
from palestra.model.ops import apply_rope, rms_norm, swiglu
from palestra.model.rope import Rotary
from palestra.model.spec import ModelSpec
from palestra.model.weights import DecoderWeights


class Decoder:
    def __init__(self, spec: ModelSpec, weights: DecoderWeights):
        self.spec, self.weights = spec, weights
        self.device, self.dtype = weights.norm.device, weights.norm.dtype
        self.rotary = Rotary.of(spec, self.device)

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: Attention, plan: LoraPlan, *, checkpointing: bool = False
    ) -> Tensor:
        """Final hidden states, normalised: [tokens, hidden]. The unembedding is the caller's, in chunks."""
        hidden = embedding(tokens, self.weights.embedding)
        angles = self.rotary.angles(positions, self.dtype)
        for n in range(self.spec.n_layers):
            if checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(
                    self._layer, n, hidden, angles, attend, plan, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = self._layer(n, hidden, angles, attend, plan)
        return rms_norm(hidden, self.weights.norm, self.spec.norm_eps)

    def _layer(
        self, n: int, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attention, plan: LoraPlan
    ) -> Tensor:
        w, eps = self.weights.layers[n], self.spec.norm_eps
        x = rms_norm(hidden, w.input_norm, eps)
        mixed = self._attention(n, lora_linear(x, w.qkv, w.qkv_bias, (n, "qkv"), plan), angles, attend)
        hidden = hidden + lora_linear(mixed, w.o, w.o_bias, (n, "o"), plan)
        x = rms_norm(hidden, w.mlp_norm, eps)
        activated = swiglu(lora_linear(x, w.gate_up, w.gate_up_bias, (n, "gate_up"), plan))
        return hidden + lora_linear(activated, w.down, w.down_bias, (n, "down"), plan)

    def _attention(self, n: int, qkv: Tensor, angles: tuple[Tensor, Tensor], attend: Attention) -> Tensor:
        spec, w = self.spec, self.weights.layers[n]
        qk, v = qkv.split([spec.q_size + spec.kv_size, spec.kv_size], dim=-1)
        qk = qk.unflatten(-1, (spec.n_heads + spec.n_kv_heads, spec.head_dim))
        if w.qk_norm is not None:
            qk = rms_norm(qk, w.qk_norm, spec.norm_eps)
        q, k = apply_rope(qk, *angles).split([spec.n_heads, spec.n_kv_heads], dim=1)
        return attend(n, q, k, v.unflatten(-1, (spec.n_kv_heads, spec.head_dim)))
