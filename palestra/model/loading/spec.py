"""The spec of a model: its shape and its layers, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.config_fields import Config, ConfigFields
from palestra.model.loading.families import Family, family_of
from palestra.model.loading.layer_spec import (
    FULL,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    HeadShape,
    LatentAttentionSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
    Multipliers,
    RecurrenceSpec,
    RopeSpec,
)
from palestra.model.loading.quantisation_fields import refuse_packing
from palestra.model.loading.rope_fields import read_ropes
from palestra.model.loading.tower_spec import TowerSpec

STATE_BYTES = 4  # recurrent states are float32


@dataclass(frozen=True)
class ModelSpec:
    """A model's shape and traits, read from its `config.json`; needs no weights."""

    architecture: str
    family: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width inside of dense feed-forward layers; 0 where there are none."""
    max_positions: int
    norm_eps: float
    has_wide_norms: bool
    has_offset_norms: bool
    ropes: dict[str, RopeSpec]
    """By the kind of attention layers they belong to; see `AttentionSpec.rope`."""
    multipliers: Multipliers
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The dtype to compute in, if none is chosen: the config's `compute_dtype`, or that of the stored weights."""
    tower: TowerSpec | None = None
    """What reads pictures; None: the model reads text only."""

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def rope(self) -> RopeSpec:
        """The rope of layers that see everything, or of any layer if there are none."""
        return self.ropes.get(FULL) or next(iter(self.ropes.values()))

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None where there is none."""
        return tuple(layer.mixer.window if isinstance(layer.mixer, AttentionSpec) else None for layer in self.layers)

    @property
    def sliding_window(self) -> int | None:
        return next((w for w in self.windows if w is not None), None)

    @cached_property
    def has_sinks(self) -> bool:
        return any(isinstance(layer.mixer, AttentionSpec) and layer.mixer.has_sinks for layer in self.layers)

    @cached_property
    def heads(self) -> tuple[HeadShape, ...]:
        """The heads of each layer: the model's, where a layer has none of its own."""
        common = HeadShape(self.n_heads, self.n_kv_heads, self.head_dim)
        mixers = (layer.mixer for layer in self.layers)
        return tuple((isinstance(mixer, AttentionSpec) and mixer.heads) or common for mixer in mixers)

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have keys and values of their own."""
        attention = AttentionSpec | LatentAttentionSpec
        return tuple(
            n for n, layer in enumerate(self.layers) if isinstance(layer.mixer, attention) and n not in self.kv_sources
        )

    @cached_property
    def kv_sources(self) -> dict[int, int]:
        """Layers that read the keys and values of another one, and which that is."""
        mixers = ((n, layer.mixer) for n, layer in enumerate(self.layers))
        found = ((n, mixer.kv_source) for n, mixer in mixers if isinstance(mixer, AttentionSpec))
        return {n: source for n, source in found if source is not None}

    @cached_property
    def kv_sides(self) -> int:
        """2: the cache has keys and values; 1: it has compressed rows, which are both."""
        return 1 if any(isinstance(layer.mixer, LatentAttentionSpec) for layer in self.layers) else 2

    @cached_property
    def key_tail(self) -> int:
        """Numbers of a compressed row that are no values: the rotated part of keys. 0 if keys and values are apart."""
        return next((layer.mixer.rope_dim for layer in self.layers if isinstance(layer.mixer, LatentAttentionSpec)), 0)

    @cached_property
    def recurrences(self) -> dict[int, RecurrenceSpec]:
        """The layers that have a recurrent state, by number."""
        return self.delta_nets | self.mambas

    @cached_property
    def delta_nets(self) -> dict[int, DeltaNetSpec]:
        return {n: layer.mixer for n, layer in enumerate(self.layers) if isinstance(layer.mixer, DeltaNetSpec)}

    @cached_property
    def mambas(self) -> dict[int, MambaSpec]:
        return {n: layer.mixer for n, layer in enumerate(self.layers) if isinstance(layer.mixer, MambaSpec)}

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that the KV cache holds of a token."""
        return self.kv_sides * sum(self.heads[n].kv_size for n in self.attention_layers)

    def state_bytes(self, item_bytes: int) -> int:
        """Recurrent states of one sequence; the inputs of convolutions are kept in the model's own type."""
        return sum(
            prod(layer.state_shape) * STATE_BYTES + prod(layer.conv_state_shape) * item_bytes
            for layer in self.recurrences.values()
        )

    @cached_property
    def experts(self) -> dict[int, ExpertsSpec]:
        """The layers that have experts, by number."""
        return {n: layer.mlp for n, layer in enumerate(self.layers) if isinstance(layer.mlp, ExpertsSpec)}

    def dense_size(self, mlp: MlpSpec) -> int:
        """Width inside of a dense network."""
        return mlp.size or self.intermediate_size

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
        architecture, family = family_of(config, source)
        fields = ConfigFields.of_text(config, source, family.defaults)
        _refuse_unsupported(fields, *family.activation)
        hidden_size = fields.integer("hidden_size")
        layers = family.layers(fields, fields.integer("num_hidden_layers"))
        n_heads, n_kv_heads, head_dim = _heads(fields, layers)
        max_positions = fields.integer("max_position_embeddings", default=2048)
        ropes = read_ropes(fields, family, layers, head_dim)
        is_dense = any(isinstance(layer.mlp, MlpSpec) or (layer.mlp and layer.mlp.beside) for layer in layers)
        return cls(
            architecture=architecture,
            family=family.name,
            layers=layers,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            intermediate_size=fields.integer("intermediate_size") if is_dense else 0,
            max_positions=int(min(max_positions, *(rope.max_positions for rope in ropes.values()))),
            norm_eps=fields.number(family.norm_eps, default=1e-6),
            has_wide_norms=family.has_wide_norms,
            has_offset_norms=family.has_offset_norms,
            ropes=ropes,
            multipliers=family.multipliers(fields),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            eos_token_ids=_token_ids(eos if eos is not None else fields.get("eos_token_id")),
            dtype=str(fields.get("compute_dtype") or fields.get("dtype") or fields.get("torch_dtype") or "float32"),
            tower=_tower(config, source, family, hidden_size),
        )


def _tower(config: Config, source: str, family: Family, hidden_size: int) -> TowerSpec | None:
    tower = None if family.tower is None else family.tower(config, source)
    if tower is not None and tower.out_size != hidden_size:
        raise UnsupportedModel(
            f"{source}: out_hidden_size of vision_config is {tower.out_size}, hidden_size is {hidden_size}"
        )
    return tower


def _heads(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, and their width. Compressed rows are one head for all queries."""
    n_heads = fields.integer("num_attention_heads")
    for layer in layers:
        if isinstance(layer.mixer, LatentAttentionSpec):
            return n_heads, 1, layer.mixer.row_size
    n_kv_heads = fields.integer("num_key_value_heads", default=n_heads)
    if n_heads % n_kv_heads:
        raise UnsupportedModel(
            f"{fields.source}: num_attention_heads ({n_heads}) is not a multiple of num_key_value_heads ({n_kv_heads})"
        )
    return n_heads, n_kv_heads, fields.integer("head_dim", default=fields.integer("hidden_size") // n_heads)


def _refuse_unsupported(fields: ConfigFields, field: str, activation: str) -> None:
    if quantised := fields.get("quantization_config"):
        refuse_packing(fields.source, quantised)
    found = fields.get(field, activation)
    if found != activation:
        raise UnsupportedModel(f"{fields.source}: {field} is {found!r}; supported: {activation!r}")


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
