"""The model families that the GGUF format has, and what its readers know of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from palestra.model.loading.layer_spec import Multipliers
from palestra.model.loading.spec import ModelSpec

Experts = Literal["none", "all", "all or none", "behind dense", "where said"]
"""Which layers have experts: those behind some first dense ones, or those of which the file says it."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    architecture: str
    """What the format calls it."""
    experts: Experts = "none"
    has_pairs: bool = False
    """Rotated dimensions of queries and keys stand in pairs in the file, and in halves in a Hugging Face folder."""
    has_windows: bool = False
    """Layers may have a window; elsewhere the file's context ends where the first window does."""
    has_biases: bool = False
    """Attention may have biases on all projections, and feed-forward networks on theirs."""
    has_delta_nets: bool = False
    """All layers but every so many have delta nets, and the others gated attention."""
    has_single_parts: bool = False
    """A layer is a Mamba-2, attention or a feed-forward network."""
    has_latent_attention: bool = False
    """Keys and values are made of a latent row, for which the file has a matrix each."""
    has_sections: bool = False
    """Positions of pictures are time, height and width, each of which turns some of the pairs."""
    has_sinks: bool = False
    """Attention has sinks, every second layer a window, and experts have biases and the activation of gpt-oss."""
    is_gemma4: bool = False
    """Layers without a window have heads of another shape, which may use keys as values; the last ones may read keys of
    others; dense networks stand beside experts, whose gates and ups are one matrix; scores are not scaled."""
    unrotated_every: int | None = None
    """Every so many layers, one does not rotate queries and keys; None: all do."""
    rope: str | None = None
    """A scaling of positions beside those of `ROPES`."""
    has_query_scale: bool = False
    """Queries grow with their position."""
    says_multipliers: bool = False
    """The file names the constants that are multiplied by, that of attention among them."""
    multipliers: Callable[[ModelSpec], Multipliers] = lambda spec: Multipliers()
    """The constants that readers of the format multiply by, where the file does not name them."""


def _gemma_multipliers(spec: ModelSpec) -> Multipliers:
    cap = spec.multipliers.logit_cap  # which the file says
    return Multipliers(embedding=spec.hidden_size**0.5, rounds_embedding=True, logit_cap=cap)


ROPES = ("default", "linear", "llama3", "yarn")
_LLAMA = GgufFamily("llama", has_pairs=True, has_biases=True)
_DEEPSEEK = GgufFamily("deepseek2", experts="behind dense", has_latent_attention=True)
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral3": GgufFamily("mistral3", has_pairs=True, has_query_scale=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
    "qwen3_moe": GgufFamily("qwen3moe", experts="all"),
    "qwen3_vl": GgufFamily("qwen3vl", has_sections=True),
    "qwen3_vl_moe": GgufFamily("qwen3vlmoe", experts="all", has_sections=True),
    "qwen3_next": GgufFamily("qwen3next", experts="all", has_delta_nets=True),
    "qwen3_5": GgufFamily("qwen35", has_delta_nets=True, has_sections=True),
    "qwen3_5_moe": GgufFamily("qwen35moe", experts="all", has_delta_nets=True, has_sections=True),
    "gpt_oss": GgufFamily("gpt-oss", experts="all", has_windows=True, has_biases=True, has_sinks=True),
    "phi3": GgufFamily("phi3", rope="longrope"),
    "olmo2": GgufFamily("olmo2"),
    "olmo3": GgufFamily("olmo2", has_windows=True),
    "smollm3": GgufFamily("smollm3", has_pairs=True, unrotated_every=4),
    "granite": GgufFamily("granite", has_pairs=True, says_multipliers=True),
    "seed_oss": GgufFamily("seed_oss"),
    "gemma3": GgufFamily("gemma3", has_windows=True, multipliers=_gemma_multipliers),
    "gemma4": GgufFamily(
        "gemma4",
        experts="all or none",
        has_windows=True,
        is_gemma4=True,
        rope="proportional",
        multipliers=_gemma_multipliers,
    ),
    "glm4_moe": GgufFamily("glm4moe", experts="behind dense"),
    "glm4_moe_lite": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "nemotron_h": GgufFamily("nemotron_h", experts="where said", has_single_parts=True),
}
"""By the name that our table of families has for it."""
