"""Context parallelism: the heads of a layer of which one rank computes all rows."""

from __future__ import annotations

from dataclasses import replace

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.layer_spec import AttentionSpec, DeltaNetSpec, HeadShape, LayerSpec, MambaSpec
from palestra.model.loading.spec import ModelSpec


def divide_heads(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The model with one rank's part of the heads; everything else is as it was. Raises UnsupportedModel where they
    cannot be divided."""
    require_divisible_heads(spec, ranks)
    heads = _part(HeadShape(spec.n_heads, spec.n_kv_heads, spec.head_dim), ranks)
    layers = tuple(_layer(layer, ranks) for layer in spec.layers)
    return replace(spec, n_heads=heads.n_heads, n_kv_heads=heads.n_kv_heads, layers=layers)


def require_divisible_heads(spec: ModelSpec, ranks: int) -> None:
    """Raises UnsupportedModel with a sentence on what can be done instead."""
    if (what := _indivisible(spec, ranks)) is None:
        return
    most = ranks
    while _indivisible(spec, most) is not None:
        most //= 2
    instead = "leave it out" if most == 1 else f"parallel.context={most} does, or leave it out"
    raise UnsupportedModel(
        f"parallel.context={ranks} does not divide this model: it has {what}; {instead}: checkpointing=offload and "
        "fewer bits (weights) make room for long sequences on one card"
    )


def _indivisible(spec: ModelSpec, ranks: int) -> str | None:
    """Returns the heads that so many ranks cannot share."""
    for n in (*spec.attention_layers, *spec.kv_sources):
        queries, keys = spec.heads[n].n_heads, spec.heads[n].n_kv_heads
        if queries % ranks or (keys % ranks and ranks % keys):
            return f"{queries} heads of queries and {keys} of keys and values in a layer"
    for mixer in spec.recurrences.values():
        groups = mixer.n_key_heads if isinstance(mixer, DeltaNetSpec) else mixer.n_groups
        if groups % ranks:
            kind = "heads of keys in a delta net" if isinstance(mixer, DeltaNetSpec) else "groups of heads in a Mamba"
            return f"{groups} {kind}"
    return None


def _layer(layer: LayerSpec, ranks: int) -> LayerSpec:
    match layer.mixer:
        case AttentionSpec(heads=HeadShape() as heads) as mixer:
            return replace(layer, mixer=replace(mixer, heads=_part(heads, ranks)))
        case DeltaNetSpec(n_key_heads=keys, n_value_heads=values) as mixer:
            return replace(layer, mixer=replace(mixer, n_key_heads=keys // ranks, n_value_heads=values // ranks))
        case MambaSpec(n_heads=heads, n_groups=groups) as mixer:
            return replace(layer, mixer=replace(mixer, n_heads=heads // ranks, n_groups=groups // ranks))
    return layer


def _part(heads: HeadShape, ranks: int) -> HeadShape:
    """Heads of keys and values that are fewer than the ranks are computed by several of them."""
    return HeadShape(heads.n_heads // ranks, max(1, heads.n_kv_heads // ranks), heads.head_dim)
