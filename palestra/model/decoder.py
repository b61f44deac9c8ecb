"""The decoder: one block, in which a family's entry says what mixes positions and what follows.

Tokens of many sequences stand packed in one row dimension; who may see whom is the attention's business, where a
recurrence begins the recurrence's, which adapter a row uses the LoRA plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import embedding

from palestra.model.attention.packed import Attention
from palestra.model.attention.rope import Rotary
from palestra.model.block_ops import BlockOps
from palestra.model.loading.layer_spec import (
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    MambaSpec,
    MlpSpec,
    Multipliers,
)
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weights import (
    AttentionWeights,
    DecoderWeights,
    DeltaNetWeights,
    ExpertsWeights,
    LatentAttentionWeights,
    MambaWeights,
    MlpWeights,
    ParallelWeights,
)
from palestra.model.lora.layout import SiteName
from palestra.model.lora.linear import LoraPlan
from palestra.model.mixers.attention import AttentionMixer
from palestra.model.mixers.delta_net import DeltaNetMixer
from palestra.model.mixers.inputs import MixerInputs, Recurrence
from palestra.model.mixers.latent_attention import LatentAttentionMixer
from palestra.model.mixers.mamba import MambaMixer
from palestra.model.mlp.activations import activation
from palestra.model.mlp.dense import DenseMlp
from palestra.model.mlp.experts import ExpertsMlp
from palestra.model.mlp.parallel import ParallelMlp
from palestra.model.mlp.per_layer_input import LayerEnd, PerLayerInputs
from palestra.model.mlp.routing import Routing
from palestra.model.recomputation import recomputed
from palestra.model.vision.feature_store import FeatureStore
from palestra.model.vision.placed import PictureRows

if TYPE_CHECKING:
    from palestra.model.tensor_group import TensorGroup

Layer = Callable[[Tensor, Tensor | None, MixerInputs, LoraPlan], tuple[Tensor, Tensor | None]]
"""From the residual stream and what is to be added to it to the same, one layer later."""


class Decoder:
    """The frozen base model on one device: from packed tokens to hidden states, with the adapters that a plan names.

    It computes only: attention keeps the keys and values, the training head and the sampler turn hidden states into
    losses and tokens.
    """

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, tensor: TensorGroup | None = None):
        """`tensor`: the processes that compute every layer together; spec and weights are this one's part."""
        self.spec, self.weights, self.tensor = spec, weights, tensor
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.embedding_scale = _embedding_scale(spec.multipliers, self.dtype)
        self.rotaries = {name: Rotary.of(rope, self.device) for name, rope in spec.ropes.items()}
        self.ops = BlockOps.of(self.device, self.dtype)
        self.mixers = [self._mixer(n) for n in range(spec.n_layers)]
        self.mlps = [self._mlp(n) for n in range(spec.n_layers)]
        ends = [layer.end for layer in weights.layers]
        self.ends = [None if end is None else LayerEnd(n, spec, end, self.ops) for n, end in enumerate(ends)]
        self.unread = [self._unread_sites(n) for n in range(spec.n_layers)]
        self.per_layer = None if weights.per_layer is None else PerLayerInputs(spec, weights.per_layer, self.ops)
        self.vision: FeatureStore | None = None
        """Features of pictures; None: the model reads text only."""
        self.sharded: Callable[..., tuple[Tensor, Tensor | None]] | None = None
        """Runs all layers where their weights are gathered from other processes (see `sharding`)."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attention,
        plan: LoraPlan,
        recur: Recurrence | None = None,
        *,
        checkpointing: bool = False,
        routing: Routing | None = None,
        pictures: PictureRows | None = None,
    ) -> Tensor:
        """Final hidden states, normalised: [tokens, hidden]. The unembedding is the caller's, in chunks. Where there
        are pictures, `positions` are [tokens, 3], and what `tokens` has at their rows does not matter."""
        hidden = scaled(embedding(tokens, self.weights.embedding), self.embedding_scale)
        if pictures is not None:
            hidden = pictures.enter(hidden)
        angles = {name: rotary.angles(positions, self.dtype) for name, rotary in self.rotaries.items()}
        per_layer = None if self.per_layer is None else self.per_layer(tokens, hidden)
        inputs = MixerInputs(angles, attend, recur, routing, per_layer, pictures)
        run = self.sharded or partial(self.run_layers, map(self.layer, range(self.spec.n_layers)))
        hidden, update = run(hidden, inputs, plan, checkpointing=checkpointing)
        return self.ops.add_rms_norm(hidden, update, self.weights.norm, self.spec.norm_eps)[1]

    def layer(self, n: int) -> Layer:
        return partial(self._layer, n)

    def run_layers(
        self, layers: Iterable[Layer], hidden: Tensor, inputs: MixerInputs, plan: LoraPlan, *, checkpointing: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Runs all layers and returns the output of the last."""
        update = None
        for n, layer in enumerate(layers):
            if checkpointing and torch.is_grad_enabled():
                if update is not None:
                    hidden = hidden + update  # as the layer would: so one tensor is kept instead of two
                hidden, update = recomputed(layer, hidden, None, inputs, plan, unread=self.unread[n])
            else:
                hidden, update = layer(hidden, update, inputs, plan)
        return hidden, update

    def _layer(
        self, n: int, hidden: Tensor, update: Tensor | None, inputs: MixerInputs, plan: LoraPlan
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream before the block's last half, and what that half adds: the next norm joins them."""
        w = self.weights.layers[n]
        if (mixer := self.mixers[n]) is not None:
            hidden, x = self._enter(hidden, update, w.input_norm)
            update = self._leave(mixer(x, inputs, plan), w.mixer_out_norm)
        if (mlp := self.mlps[n]) is not None:
            hidden, x = self._enter(hidden, update, w.mlp_norm)
            update = self._leave(mlp(x, plan, inputs.routing), w.mlp_out_norm)
        if (end := self.ends[n]) is not None:
            hidden, update = end(hidden, update, inputs.per_layer, plan), None
        if inputs.pictures is not None and update is not None:
            update = inputs.pictures.add_behind(n, update)
        return hidden, update

    def _enter(self, hidden: Tensor, update: Tensor | None, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream with the update, and what a half of a layer reads of it."""
        if norm is not None:
            hidden, x = self.ops.add_rms_norm(hidden, update, norm, self.spec.norm_eps)
        else:
            hidden = x = hidden if update is None else hidden + update
        return hidden, x if self.tensor is None else self.tensor.enter(x)

    def _leave(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """Returns what a half of a layer adds to the residual stream."""
        if self.tensor is not None:
            x = self.tensor.leave(x)
        if norm is not None:
            x = self.ops.add_rms_norm(x, None, norm, self.spec.norm_eps)[1]
        return scaled(x, self.spec.multipliers.residual)

    def _unread_sites(self, n: int) -> frozenset[SiteName]:
        """The layer's last linear layers, whose outputs are added to the residual stream as they are: the gradient of
        the layer does not read them."""
        w, mlp = self.weights.layers[n], self.mlps[n]
        last_norm = w.mixer_out_norm if mlp is None else w.mlp_out_norm
        if last_norm is not None or self.ends[n] is not None or isinstance(mlp, ParallelMlp):
            return frozenset()
        if isinstance(mlp, ExpertsMlp):
            return mlp.unread_sites
        return frozenset({(n, "o" if mlp is None else "down")})

    def _mixer(self, n: int) -> AttentionMixer | LatentAttentionMixer | DeltaNetMixer | MambaMixer | None:
        match self.spec.layers[n].mixer, self.weights.layers[n].mixer:
            case AttentionSpec() as mixer, AttentionWeights() as weights:
                return AttentionMixer(n, self.spec, mixer, weights, self.ops)
            case LatentAttentionSpec() as mixer, LatentAttentionWeights() as weights:
                return LatentAttentionMixer(n, self.spec, mixer, weights, self.ops)
            case DeltaNetSpec() as mixer, DeltaNetWeights() as weights:
                return DeltaNetMixer(n, self.spec, mixer, weights, self.ops)
            case MambaSpec() as mixer, MambaWeights() as weights:
                return MambaMixer(n, self.spec, mixer, weights, self.ops)
            case None, None:
                return None
        raise TypeError(f"the weights of layer {n} are not those its spec asks for")

    def _mlp(self, n: int) -> DenseMlp | ExpertsMlp | ParallelMlp | None:
        match self.spec.layers[n].mlp, self.weights.layers[n].mlp:
            case MlpSpec() as mlp, MlpWeights() as weights:
                return DenseMlp(n, weights, activation(mlp.activation, self.ops))
            case ExpertsSpec() as experts, ExpertsWeights() as weights:
                return ExpertsMlp(n, experts, weights, self.ops)
            case ExpertsSpec() as experts, ParallelWeights() as weights:
                return ParallelMlp(n, self.spec, experts, weights, self.ops)
            case None, None:
                return None
        raise TypeError(f"the weights of layer {n} are not those its spec asks for")


def _embedding_scale(multipliers: Multipliers, dtype: torch.dtype) -> float:
    scale = multipliers.embedding
    return torch.tensor(scale, dtype=dtype).item() if multipliers.rounds_embedding else scale


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
