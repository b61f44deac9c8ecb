"""Tensor parallelism: the shard of every layer that one rank computes.

Heads and the width inside of feed-forward networks, or of each expert, are divided: projections into them have a part
of their rows at each rank, and projections out of them the same part of their columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.layer_spec import (
    AttentionSpec,
    ExpertsSpec,
    HeadShape,
    LatentAttentionSpec,
    LayerSpec,
    MlpSpec,
)
from palestra.model.loading.spec import ModelSpec

INSTEAD = (
    "leave parallel.tensor out: parallel.shard divides the memory of any model for training, and for sampling there is "
    "sampler=vllm, with --tensor-parallel-size among vllm.args"
)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The shard of one of the ranks that compute every layer together."""

    rank: int = 0
    ranks: int = 1

    def own(self, size: int) -> slice:
        part = size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)

    def heads(self, heads: HeadShape) -> HeadShape:
        return HeadShape(heads.n_heads // self.ranks, heads.n_kv_heads // self.ranks, heads.head_dim)

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The model as this rank computes it. Raises UnsupportedModel where it cannot be divided."""
        if self.ranks == 1:
            return spec
        require_divisible(spec, self.ranks)
        heads = self.heads(HeadShape(spec.n_heads, spec.n_kv_heads, spec.head_dim))
        return replace(
            spec,
            n_heads=heads.n_heads,
            n_kv_heads=heads.n_kv_heads,
            intermediate_size=spec.intermediate_size // self.ranks,
            layers=tuple(self._layer(layer) for layer in spec.layers),
        )

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mixer, AttentionSpec) and mixer.heads is not None:
            mixer = replace(mixer, heads=self.heads(mixer.heads))
        if isinstance(mlp, MlpSpec) and mlp.size is not None:
            mlp = replace(mlp, size=mlp.size // self.ranks)
        if isinstance(mlp, ExpertsSpec):
            mlp = replace(mlp, size=mlp.size // self.ranks, shared_size=mlp.shared_size // self.ranks)
        return replace(layer, mixer=mixer, mlp=mlp)


WHOLE = TensorShard()


def require_divisible(spec: ModelSpec, ranks: int) -> None:
    """Raises UnsupportedModel with a sentence on what can be done instead."""
    if ranks == 1:
        return
    if (what := _indivisible(spec)) is not None:
        raise UnsupportedModel(f"parallel.tensor={ranks} cannot divide {spec.family} models: {what}; {INSTEAD}")
    widths = {spec.dense_size(layer.mlp) for layer in spec.layers if isinstance(layer.mlp, MlpSpec)}
    widths |= {size for experts in spec.experts.values() for size in (experts.size, experts.shared_size)}
    counts = {heads.n_kv_heads for heads in spec.heads} | {heads.n_heads for heads in spec.heads}
    if odd := [n for n in (*counts, *widths) if n % ranks]:
        heads = min(heads.n_kv_heads for heads in spec.heads)
        raise UnsupportedModel(
            f"parallel.tensor={ranks} does not divide this model: it has {heads} heads of keys and values, and "
            f"{min(odd)} is not a multiple of {ranks}; choose a smaller number, or {INSTEAD}"
        )


def _indivisible(spec: ModelSpec) -> str | None:
    """Returns the part of a model that cannot be divided yet."""
    for layer in spec.layers:
        match layer.mixer:
            case AttentionSpec(is_fused=False, qk_norm="head" | None):
                pass
            case AttentionSpec(is_fused=True):
                return "their files have queries, keys and values in one matrix"
            case AttentionSpec():
                return "their queries are normalised over all heads"
            case LatentAttentionSpec():
                return "they have latent attention"
            case None:
                return "their layers are attention or experts alone"
            case _:
                return "they have recurrent layers"
        match layer.mlp:
            case MlpSpec(is_fused=False) | ExpertsSpec(latent_size=None, beside=None):
                pass
            case MlpSpec():
                return "their files have gate and up in one matrix"
            case ExpertsSpec():
                return "they have experts of a width of their own, or beside a dense network"
            case None:
                return "they have layers without a feed-forward network"
        if layer.per_layer_input:
            return "their layers have inputs of their own"
    return None
