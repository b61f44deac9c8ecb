"""Per-layer inputs: a small embedding of each token for every layer, which enters behind the layer's network (Gemma
4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, linear

from palestra.model.block_ops import BlockOps
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weights import LayerEndWeights, PerLayerWeights
from palestra.model.lora.linear import LoraPlan, lora_linear


class PerLayerInputs:
    """What each layer gets of a token: something of its embedding, and an embedding of its own."""

    def __init__(self, spec: ModelSpec, weights: PerLayerWeights, ops: BlockOps):
        self.spec, self.weights, self.ops, width = spec, weights, ops, weights.norm.shape[-1]
        self.own_scale = torch.tensor(width**0.5, dtype=weights.embedding.dtype).item()

    def __call__(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """[tokens, layers, width], from the embeddings that enter the first layer."""
        w, shape = self.weights, (self.spec.n_layers, -1)
        projected = linear(embedded, w.projection) * self.spec.hidden_size**-0.5
        rows = projected.view(-1, w.norm.shape[-1])
        projected = self.ops.add_rms_norm(rows, None, w.norm, self.spec.norm_eps)[1].view_as(projected)
        projected = projected.unflatten(1, shape)
        own = (embedding(tokens, w.embedding) * self.own_scale).unflatten(1, shape)
        return (projected + own) * 2**-0.5


class LayerEnd:
    """What follows the halves of a layer: its own input, if there is one, and a factor on the residual stream. Adapters
    train none of it; products go by the plan all the same, since autograd must not keep weights that are written out
    for one product."""

    def __init__(self, n: int, spec: ModelSpec, weights: LayerEndWeights, ops: BlockOps):
        self.n, self.spec, self.weights, self.ops = n, spec, weights, ops

    def __call__(self, hidden: Tensor, update: Tensor | None, per_layer: Tensor | None, plan: LoraPlan) -> Tensor:
        w, n = self.weights, self.n
        hidden = hidden if update is None else hidden + update
        if w.gate is not None and w.projection is not None and w.norm is not None and per_layer is not None:
            gate = lora_linear(hidden, w.gate, None, (n, "per_layer_gate"), plan)
            gated = gelu(gate, approximate="tanh") * per_layer[:, n]
            projected = lora_linear(gated, w.projection, None, (n, "per_layer_projection"), plan)
            hidden = hidden + self.ops.add_rms_norm(projected, None, w.norm, self.spec.norm_eps)[1]
        return hidden * w.scalar
