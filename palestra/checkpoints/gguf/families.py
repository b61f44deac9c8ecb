"""Which of our model families the GGUF format has, and what it asks of their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from palestra.checkpoints import CheckpointError
from palestra.model.loading.layer_spec import (
    UNROTATED,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    Multipliers,
    RopeSpec,
)
from palestra.model.loading.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class GgufFamily:
    architecture: str
    """What the format calls it."""
    has_pairs: bool = False
    """Rotated dimensions of queries and keys stand in pairs, and not in halves."""
    has_windows: bool = False
    """Layers may have a window; elsewhere the file's context ends where the first window does."""
    has_biases: bool = False
    """Attention may have biases on all projections, and feed-forward networks on theirs."""
    has_experts: bool | None = False
    """All layers have experts, whose chosen ones' weights sum to 1; None: all or none."""
    has_delta_nets: bool = False
    """All layers but every so many have delta nets, and the others gated attention."""
    has_sinks: bool = False
    """Attention has sinks, every second layer a window, and experts have biases and the activation of gpt-oss."""
    is_gemma4: bool = False
    """Layers without a window have heads of another shape, which may use keys as values; the last ones may read keys of
    others; dense networks stand beside experts, whose gates and ups are one matrix; scores are not scaled."""
    unrotated_every: int | None = None
    """Every so many layers, one does not rotate queries and keys; None: all do."""
    says_multipliers: bool = False
    """The file names the constants that are multiplied by, that of attention among them."""
    multipliers: Callable[[ModelSpec], Multipliers] = lambda spec: Multipliers()
    """The constants that readers of the format multiply by, where the file does not name them."""


def _gemma_multipliers(spec: ModelSpec) -> Multipliers:
    cap = spec.multipliers.logit_cap  # which the file says
    return Multipliers(embedding=spec.hidden_size**0.5, rounds_embedding=True, logit_cap=cap)


_LLAMA = GgufFamily("llama", has_pairs=True, has_biases=True)
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "qwen3_moe": GgufFamily("qwen3moe", has_experts=True),
    "olmo2": GgufFamily("olmo2"),
    "smollm3": GgufFamily("smollm3", has_pairs=True, unrotated_every=4),
    "granite": GgufFamily("granite", has_pairs=True, says_multipliers=True),
    "seed_oss": GgufFamily("seed_oss"),
    "qwen3_5": GgufFamily("qwen35", has_delta_nets=True),
    "qwen3_5_moe": GgufFamily("qwen35moe", has_delta_nets=True, has_experts=True),
    "gpt_oss": GgufFamily("gpt-oss", has_windows=True, has_biases=True, has_experts=True, has_sinks=True),
    "gemma3": GgufFamily("gemma3", has_windows=True, multipliers=_gemma_multipliers),
    "gemma4": GgufFamily("gemma4", has_windows=True, has_experts=None, is_gemma4=True, multipliers=_gemma_multipliers),
}
"""By the name that our table of families has for it."""
ROPES = ("default", "linear", "llama3", "yarn")
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
    if odd := next((odd for rope in spec.ropes.values() if (odd := _odd_rope(rope, family))), None):
        return odd
    if family.has_delta_nets and attention_interval(spec) is None:
        return "choice of layers with attention"
    if family.architecture == "olmo2" and spec.tie_embeddings:
        return "tied embeddings"
    return next((odd for n, layer in enumerate(spec.layers) if (odd := _odd_part(spec, n, layer, family))), None)


def _odd_rope(rope: RopeSpec, family: GgufFamily) -> str | None:
    is_known = rope.type in ROPES or (rope.type == "proportional" and family.is_gemma4)
    if not is_known or rope.query_beta or (rope.sections is not None and not family.has_delta_nets):
        return f"rope of type {rope.type}"
    extras = [name for name in _YARN_EXTRAS if rope.parameters.get(name) is not None]
    if rope.type == "yarn" and (extras or not (rope.parameters.get("truncate", True) or family.has_sinks)):
        return f"rope settings {', '.join(extras) or 'truncate'}"
    return None


def _odd_part(spec: ModelSpec, number: int, layer: LayerSpec, family: GgufFamily) -> str | None:
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mlp, MlpSpec | ExpertsSpec):
        return "layers"
    if family.has_experts is not None and isinstance(mlp, ExpertsSpec) != family.has_experts:
        return "mixture of layers with and without experts"
    if isinstance(mlp, ExpertsSpec) and not mlp.normalises:
        return "weights of experts, which do not sum to 1"
    if isinstance(mixer, DeltaNetSpec) and family.has_delta_nets:
        return None if mixer.key_dim == mixer.value_dim else "width of values in delta nets"
    if not isinstance(mixer, AttentionSpec):
        return "layers"
    if (mixer.o_bias or mlp.has_bias) and not family.has_biases:
        return "biases"
    if family.has_sinks and (not mixer.has_sinks or (mixer.window is None) != (number % 2 == 1)):
        return "layers"
    if isinstance(mlp, ExpertsSpec) and mlp.limit not in ((_CLAMP,) if family.has_sinks else (None,)):
        return f"limit of what experts compute ({mlp.limit})"
    every = family.unrotated_every
    if (mixer.rope == UNROTATED) != (every is not None and (number + 1) % every == 0):
        return "choice of layers that do not rotate"
    if mixer.scale is not None and not family.says_multipliers and not family.is_gemma4:
        width = spec.hidden_size // spec.n_heads if spec.n_layers == _GEMMA_27B_LAYERS else spec.head_dim
        if abs(mixer.scale - width**-0.5) > 1e-6:
            return f"scale of attention ({mixer.scale:.4g})"
    return None


def _rounded(multipliers: Multipliers) -> tuple[Any, ...]:
    return (round(multipliers.embedding, 3), multipliers.residual, multipliers.logits, multipliers.logit_cap)
