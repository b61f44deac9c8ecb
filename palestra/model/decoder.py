"""The decoder: one block for the whole Llama family.

Tokens of many sequences stand packed in one row dimension; who may see whom is the attention's business, which adapter
a row uses the LoRA plan's.

Owns: the forward pass. Never touches: caches, losses, sampling.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from palestra.model.attention.packed import Attention
from palestra.model.attention.rope import Rotary
from palestra.model.block_ops import BlockOps
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weights import DecoderWeights
from palestra.model.lora.linear import LoraPlan, lora_linear


class Decoder:
    """The frozen base model on one device: from packed tokens to hidden states, with the adapters that a plan names.

    It computes only: attention keeps the keys and values, the training head and the sampler turn hidden states into
    losses and tokens.
    """

    def __init__(self, spec: ModelSpec, weights: DecoderWeights):
        self.spec, self.weights = spec, weights
        self.device, self.dtype = weights.norm.device, weights.norm.dtype
        self.rotary = Rotary.of(spec, self.device)
        self.ops = BlockOps.on(self.device, self.dtype)

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: Attention, plan: LoraPlan, *, checkpointing: bool = False
    ) -> Tensor:
        """Final hidden states, normalised: [tokens, hidden]. The unembedding is the caller's, in chunks."""
        hidden, update = embedding(tokens, self.weights.embedding), None
        angles = self.rotary.angles(positions, self.dtype)
        for n in range(self.spec.n_layers):
            if checkpointing and torch.is_grad_enabled():
                hidden, update = checkpoint(
                    self._layer, n, hidden, update, angles, attend, plan, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden, update = self._layer(n, hidden, update, angles, attend, plan)
        return self.ops.add_rms_norm(hidden, update, self.weights.norm, self.spec.norm_eps)[1]

    def _layer(
        self,
        n: int,
        hidden: Tensor,
        update: Tensor | None,
        angles: tuple[Tensor, Tensor],
        attend: Attention,
        plan: LoraPlan,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream before the block's second half, and what that half adds: the next norm joins them."""
        w, ops, eps = self.weights.layers[n], self.ops, self.spec.norm_eps
        hidden, x = ops.add_rms_norm(hidden, update, w.input_norm, eps)
        mixed = self._attention(n, lora_linear(x, w.qkv, w.qkv_bias, (n, "qkv"), plan), angles, attend)
        hidden, x = ops.add_rms_norm(hidden, lora_linear(mixed, w.o, w.o_bias, (n, "o"), plan), w.mlp_norm, eps)
        activated = ops.swiglu(lora_linear(x, w.gate_up, w.gate_up_bias, (n, "gate_up"), plan))
        return hidden, lora_linear(activated, w.down, w.down_bias, (n, "down"), plan)

    def _attention(self, n: int, qkv: Tensor, angles: tuple[Tensor, Tensor], attend: Attention) -> Tensor:
        spec = self.spec
        heads = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)
        return attend(n, *self.ops.rotate_heads(qkv, self.weights.layers[n].qk_norm, angles, spec.norm_eps, heads))
