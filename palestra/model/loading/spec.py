"""What a model is: the shape and traits read from a Hugging Face `config.json`.

Owns: the table of supported families. Never touches: weights, tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.model.errors import UnsupportedModel

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    type: str
    theta: float
    parameters: dict[str, Any]
    """The raw fields of the scaling (factor, low_freq_factor, beta_fast, …)."""


@dataclass(frozen=True, slots=True)
class Traits:
    """How one family differs from the plain Llama block."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


Config = dict[str, Any]

FAMILIES: dict[str, Callable[[Config], Traits]] = {
    "LlamaForCausalLM": lambda c: Traits(
        qkv_bias=bool(c.get("attention_bias")),
        o_bias=bool(c.get("attention_bias")),
        mlp_bias=bool(c.get("mlp_bias")),
    ),
    "MistralForCausalLM": lambda c: Traits(),
    "Qwen2ForCausalLM": lambda c: Traits(qkv_bias=True),
    "Qwen3ForCausalLM": lambda c: Traits(
        qkv_bias=bool(c.get("attention_bias")), o_bias=bool(c.get("attention_bias")), qk_norm=True
    ),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's shape and traits, read from its `config.json`; needs no weights."""

    architecture: str
    traits: Traits
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    windows: tuple[int | None, ...]
    """Per layer: how many tokens back a position sees; None is all of them."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The dtype of the stored weights."""

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def sliding_window(self) -> int | None:
        return next((w for w in self.windows if w is not None), None)

    @property
    def n_parameters(self) -> int:
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.n_layers * (attention + mlp + 2 * self.hidden_size) + embeddings + self.hidden_size

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelSpec:
        file = Path(folder) / "config.json"
        if not file.is_file():
            raise UnsupportedModel(
                f"{file}: no such file; give the folder of a Hugging Face model (config.json inside)"
            )
        try:
            config = json.loads(file.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            raise UnsupportedModel(f"{file}: not valid JSON ({e}); copy the file again") from None
        if not isinstance(config, dict):
            raise UnsupportedModel(f"{file}: not a JSON object; copy the file again")
        return cls.from_config(config, source=str(file), eos=_generation_eos(file.with_name("generation_config.json")))

    @classmethod
    def from_config(cls, config: Config, *, source: str = "config.json", eos: Any = None) -> ModelSpec:
        architecture = _architecture(config, source)
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModel(f"{source}: hidden_act is {activation!r}; supported: 'silu'")
        fields = _Fields(config, source)
        n_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        n_layers = fields.integer("num_hidden_layers")
        n_kv_heads = fields.integer("num_key_value_heads", default=n_heads)
        head_dim = fields.integer("head_dim", default=hidden_size // n_heads)
        if n_heads % n_kv_heads:
            raise UnsupportedModel(
                f"{source}: num_attention_heads ({n_heads}) is not a multiple of num_key_value_heads ({n_kv_heads})"
            )
        return cls(
            architecture=architecture,
            traits=FAMILIES[architecture](config),
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            intermediate_size=fields.integer("intermediate_size"),
            max_positions=fields.integer("max_position_embeddings", default=2048),
            norm_eps=fields.number("rms_norm_eps", default=1e-6),
            rope=_rope(config, source),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            windows=_windows(config, source, architecture, n_layers),
            eos_token_ids=_token_ids(eos if eos is not None else config.get("eos_token_id")),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )


class _Fields:
    """Reads required numbers and names the file and field when one is missing or odd."""

    def __init__(self, config: Config, source: str):
        self.config, self.source = config, source

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UnsupportedModel(f"{self.source}: field {name!r} must be a positive whole number, found {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if not isinstance(value, int | float):
            raise UnsupportedModel(f"{self.source}: field {name!r} must be a number, found {value!r}")
        return float(value)


def _architecture(config: Config, source: str) -> str:
    named = config.get("architectures") or []
    for name in named:
        if name in FAMILIES:
            if config.get("quantization_config"):
                raise UnsupportedModel(
                    f"{source}: field 'quantization_config': quantised weights are not supported; use the "
                    "float32 or bfloat16 release of this model"
                )
            return name
    found = ", ".join(map(repr, named)) or "nothing"
    raise UnsupportedModel(f"{source}: field 'architectures' names {found}; supported: {', '.join(FAMILIES)}")


def _rope(config: Config, source: str) -> RopeSpec:
    # transformers 5 writes rope_parameters; older files have rope_theta beside rope_scaling.
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{source}: field 'rope_parameters' must be an object, found {raw!r}")
    raw = dict(raw)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"{source}: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if raw.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"{source}: field 'partial_rotary_factor': only 1.0 is supported")
    theta = raw.get("rope_theta", config.get("rope_theta", 10000.0))
    needed = {"linear": ["factor"], "yarn": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    for name in needed.get(kind, []):
        if name not in raw:
            raise UnsupportedModel(f"{source}: rope type {kind!r} needs the field {name!r}")
    if "original_max_position_embeddings" not in raw:
        original = config.get("original_max_position_embeddings") or config.get("max_position_embeddings", 2048)
        raw["original_max_position_embeddings"] = original
    return RopeSpec(type=kind, theta=float(theta), parameters=raw)


def _windows(config: Config, source: str, architecture: str, n_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096)  # transformers' default for the families that have one
    if architecture.startswith("Qwen") and not config.get("use_sliding_window"):
        window = None
    if window is None or architecture == "LlamaForCausalLM":
        return (None,) * n_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28) if architecture.startswith("Qwen") else 0
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(n_layers)]
    if not isinstance(window, int) or window < 1 or len(kinds) != n_layers:
        raise UnsupportedModel(
            f"{source}: sliding_window ({window!r}) must be a positive whole number and layer_types, where given, "
            f"name all {n_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _generation_eos(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UnsupportedModel(f"{file}: not valid JSON ({e}); copy the file again or delete it") from None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{file}: not a JSON object; copy the file again or delete it")
    return raw.get("eos_token_id")
