"""Latent attention of a layer: what is cached of a token is one compressed row, whatever the number of heads.

A row is c [kv_rank], and beside it the rotated part r [rope_dim] of the keys, which all heads share. A head's key is
(W c, r) and its value U c, with frozen W [nope_dim, kv_rank] and U [value_dim, kv_rank]. Neither is made:

    (q, q_r) . (W c, r) = (W^T q, q_r) . (c, r)          W multiplies queries, [tokens, heads, kv_rank + rope_dim]
    sum of a_s U c_s    = U (sum of a_s c_s)             U multiplies what attention returns

So all heads attend to the rows themselves, in training and in sampling alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from palestra.model.block_ops import BlockOps
from palestra.model.loading.layer_spec import LatentAttentionSpec
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weights import LatentAttentionWeights
from palestra.model.lora.linear import LoraPlan, lora_linear
from palestra.model.mixers.inputs import MixerInputs

INNER_EPS = 1e-6  # of the norms on compressed rows, whatever the config says


class LatentAttentionMixer:
    def __init__(
        self, n: int, spec: ModelSpec, mixer: LatentAttentionSpec, weights: LatentAttentionWeights, ops: BlockOps
    ):
        self.n, self.mixer, self.weights, self.ops, self.n_heads = n, mixer, weights, ops, spec.n_heads
        self.query_scale = mixer.scale * spec.head_dim**0.5  # attention divides by that root

    def __call__(self, x: Tensor, inputs: MixerInputs, plan: LoraPlan) -> Tensor:
        w, n, m = self.weights, self.n, self.mixer
        q, row, k_turned = lora_linear(x, w.compress, w.compress_bias, (n, "qkv"), plan).split(
            [w.compress.shape[0] - m.row_size, m.kv_rank, m.rope_dim], 1
        )
        if w.q_norm is not None and w.q_up is not None:
            q = lora_linear(self._norm(q, w.q_norm), w.q_up, None, (n, "q_up"), plan)
        q_plain, q_turned = q.unflatten(1, (self.n_heads, -1)).split([m.nope_dim, m.rope_dim], 2)
        q_turned, k_turned = self._rotate(q_turned, k_turned, inputs)
        rows = torch.cat([self._norm(row, w.kv_norm), k_turned], 1)[:, None]
        queries = torch.cat([torch.einsum("thd,hdr->thr", q_plain, w.keys), q_turned], 2) * self.query_scale
        mixed = inputs.attend(n, queries, rows, rows).unflatten(1, (self.n_heads, -1))[..., : m.kv_rank]
        values = torch.einsum("thr,hvr->thv", mixed, w.values).flatten(1)
        return lora_linear(values, w.o, w.o_bias, (n, "o"), plan)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.ops.add_rms_norm(x, None, weight, INNER_EPS)[1]

    def _rotate(self, q: Tensor, k: Tensor, inputs: MixerInputs) -> tuple[Tensor, Tensor]:
        """[tokens, heads, dim] and [tokens, dim]."""
        both = torch.cat([q, k[:, None]], 1)
        if self.mixer.is_paired:
            both = both.unflatten(2, (-1, 2)).mT.flatten(2)
        heads = (self.n_heads, 1, 0)
        q, k, _ = self.ops.rotate_heads(both.flatten(1), None, inputs.angles[self.mixer.rope].turn, INNER_EPS, heads)
        return q, k[:, 0]
