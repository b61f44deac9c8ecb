"""Whether readers of the GGUF format would compute what a model computes here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.gguf.families import FAMILIES, ROPES, GgufFamily
from palestra.model.loading.layer_spec import (
    UNROTATED,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    MambaSpec,
    Multipliers,
    RopeSpec,
)
from palestra.model.loading.spec import ModelSpec

_YARN_EXTRAS = ("attention_factor", "mscale", "mscale_all_dim")
_CLAMP = 7.0  # where readers of the format clamp gpt-oss's activation
_GEMMA_27B_LAYERS = 62  # by which llama.cpp knows the one Gemma 3 that scales scores by another width


def gguf_family(spec: ModelSpec) -> GgufFamily:
    """Raises CheckpointError where the format has no such model, or one that would compute something else."""
    family = FAMILIES.get(spec.family)
    if family is None:
        raise CheckpointError(
            f"{spec.architecture} cannot be written as GGUF; families that can: {', '.join(FAMILIES)}\n"
            "  another tool may convert the whole model: palestra checkpoint export RUN DIR --as merged"
        )
    if family.has_single_parts and spec.experts:
        family = replace(family, architecture=f"{family.architecture}_moe")
    if (odd := _difference(spec, family)) is not None:
        raise CheckpointError(
            f"this {spec.architecture} cannot be written as GGUF: readers of the format would compute it without its "
            f"{odd}; use --as merged"
        )
    return family


def attention_interval(spec: ModelSpec) -> int | None:
    """How many layers after each other one has attention; None: not always as many."""
    has_attention = [isinstance(layer.mixer, AttentionSpec) for layer in spec.layers]
    every = has_attention.index(True) + 1 if any(has_attention) else spec.n_layers + 1
    return every if has_attention == [(n + 1) % every == 0 for n in range(spec.n_layers)] else None


def _difference(spec: ModelSpec, family: GgufFamily) -> str | None:
    """What readers of the format would not know of this model."""
    if not family.says_multipliers and _rounded(spec.multipliers) != _rounded(family.multipliers(spec)):
        return f"multipliers ({spec.multipliers})"
    ropes = () if family.has_single_parts else spec.ropes.values()  # whose attention rotates nothing
    if odd := next((odd for rope in ropes if (odd := _odd_rope(rope, family))), None):
        return odd
    if family.has_delta_nets and attention_interval(spec) is None:
        return "choice of layers with attention"
    if not _has_experts_in_place(spec, family):
        return "choice of layers with experts"
    if family.architecture == "olmo2" and spec.tie_embeddings:
        return "tied embeddings"
    return next((odd for n, layer in enumerate(spec.layers) if (odd := _odd_part(spec, n, layer, family))), None)


def _odd_rope(rope: RopeSpec, family: GgufFamily) -> str | None:
    has_place = rope.sections is None or family.has_sections
    if rope.type not in (*ROPES, family.rope) or (rope.query_beta and not family.has_query_scale) or not has_place:
        return f"rope of type {rope.type}"
    if rope.type != "yarn":
        return None
    extras = {name: rope.parameters[name] for name in _YARN_EXTRAS if rope.parameters.get(name) is not None}
    if family.has_latent_attention or family.has_query_scale:
        scales = extras.pop("mscale", 1.0), extras.pop("mscale_all_dim", 0.0)
        if scales != (1.0, 1.0):
            extras["mscale"] = scales[0]
    if extras or not (rope.parameters.get("truncate", True) or family.has_sinks):
        return f"rope settings {', '.join(extras) or 'truncate'}"
    return None


def _has_experts_in_place(spec: ModelSpec, family: GgufFamily) -> bool:
    has = [isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers]
    match family.experts:
        case "none":
            return not any(has)
        case "all":
            return all(has)
        case "all or none":
            return all(has) or not any(has)
        case "behind dense":
            return has == sorted(has) and any(has)
        case "where said":  # a file knows one kind of feed-forward network
            return not any(has) or all(has[n] for n, layer in enumerate(spec.layers) if layer.mlp is not None)


def _odd_part(spec: ModelSpec, number: int, layer: LayerSpec, family: GgufFamily) -> str | None:
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mlp, ExpertsSpec) and (odd := _odd_experts(mlp, family)):
        return odd
    if family.has_single_parts:
        is_known = isinstance(mixer, MambaSpec | AttentionSpec | None) and (mixer is None) != (mlp is None)
        return None if is_known else "layers"
    if mlp is None:
        return "layers"
    if isinstance(mixer, DeltaNetSpec) and family.has_delta_nets:
        return None if mixer.key_dim == mixer.value_dim else "width of values in delta nets"
    if isinstance(mixer, LatentAttentionSpec) and family.has_latent_attention:
        return None if mixer.is_paired and not mixer.has_bias else "latent attention"
    if not isinstance(mixer, AttentionSpec):
        return "layers"
    if (mixer.o_bias or mlp.has_bias) and not family.has_biases:
        return "biases"
    if family.has_sinks and (not mixer.has_sinks or (mixer.window is None) != (number % 2 == 1)):
        return "layers"
    every = family.unrotated_every
    if (mixer.rope == UNROTATED) != (every is not None and (number + 1) % every == 0):
        return "choice of layers that do not rotate"
    if mixer.scale is not None and not family.says_multipliers and not family.is_gemma4:
        width = spec.hidden_size // spec.n_heads if spec.n_layers == _GEMMA_27B_LAYERS else spec.head_dim
        if abs(mixer.scale - width**-0.5) > 1e-6:
            return f"scale of attention ({mixer.scale:.4g})"
    return None


def _odd_experts(experts: ExpertsSpec, family: GgufFamily) -> str | None:
    if experts.router == "softmax" and not experts.normalises:
        return "weights of experts, which do not sum to 1"
    if experts.limit not in ((_CLAMP,) if family.has_sinks else (None,)):
        return f"limit of what experts compute ({experts.limit})"
    return "smaller rows of experts" if experts.latent_size is not None else None


def _rounded(multipliers: Multipliers) -> tuple[Any, ...]:
    return (round(multipliers.embedding, 3), multipliers.residual, multipliers.logits, multipliers.logit_cap)
