"""The rotary positions that a config.json asks for."""

from __future__ import annotations

from typing import Any

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.config_fields import Config, ConfigFields
from palestra.model.loading.families import Family
from palestra.model.loading.layer_spec import (
    FULL,
    SLIDING,
    UNROTATED,
    AttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    RopeSpec,
)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
NEEDED = {
    "linear": ["factor"],
    "yarn": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
    "longrope": ["short_factor"],
}


def read_ropes(
    fields: ConfigFields, family: Family, layers: tuple[LayerSpec, ...], head_dim: int
) -> dict[str, RopeSpec]:
    """One for each kind of attention layers that there is."""
    # transformers 5 writes rope_parameters; older files have rope_theta beside rope_scaling.
    raw = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    _require_object(fields, raw)
    local = {"rope_theta": fields.get("rope_local_base_freq", fields.get("rope_theta", 10000.0))}
    if family.has_local_rope and raw.keys() & {FULL, SLIDING}:
        raw, local = raw.get(FULL) or {}, raw.get(SLIDING) or local
        _require_object(fields, raw)
        _require_object(fields, local)
    parameters = {FULL: raw, SLIDING: local if family.has_local_rope else raw}
    attention = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]
    dims = {mixer.rope: head_dim if mixer.heads is None else mixer.heads.head_dim for mixer in attention}
    dims |= {layer.mixer.rope: layer.mixer.rope_dim for layer in layers if isinstance(layer.mixer, LatentAttentionSpec)}
    return {
        kind: RopeSpec("default", 1.0, 0, {})
        if kind == UNROTATED
        else _rope(fields, family, dict(parameters[kind]), dim)
        for kind, dim in (dims or {FULL: head_dim}).items()
    }


def _require_object(fields: ConfigFields, raw: Any) -> None:
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{fields.source}: field 'rope_parameters' must be an object, found {raw!r}")


def _rope(fields: ConfigFields, family: Family, raw: Config, head_dim: int) -> RopeSpec:
    source, kind = fields.source, _type(fields, family, raw)
    factor = raw.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if factor != 1.0 and not family.has_partial_rope:
        raise UnsupportedModel(f"{source}: field 'partial_rotary_factor': only 1.0 is supported")
    if not isinstance(factor, int | float) or not 0 < factor <= 1 or int(head_dim * factor) % 2:
        raise UnsupportedModel(f"{source}: partial_rotary_factor ({factor!r}) must rotate an even part of a head")
    longest = fields.get("max_position_embeddings", 2048)
    if kind == "longrope" or "original_max_position_embeddings" not in raw:
        beside = fields.get("original_max_position_embeddings")
        raw["original_max_position_embeddings"] = beside or raw.get("original_max_position_embeddings") or longest
    dim = head_dim if kind == "proportional" else int(head_dim * factor)
    if kind == "longrope":
        raw.setdefault("factor", longest / raw["original_max_position_embeddings"])
        if not isinstance(raw["short_factor"], list) or len(raw["short_factor"]) != dim // 2:
            raise UnsupportedModel(f"{source}: short_factor must be a list of {dim // 2} numbers")
    return RopeSpec(
        type=kind,
        theta=float(raw.get("rope_theta", fields.get("rope_theta", 10000.0))),
        dim=dim,
        parameters=raw,
        is_wide=family.has_wide_rope,
        sections=_sections(fields, family, raw),
        query_beta=float(raw.get("llama_4_scaling_beta") or 0.0) if family.has_query_scaling else 0.0,
    )


def _sections(fields: ConfigFields, family: Family, raw: Config) -> tuple[int, int, int] | None:
    """Reads the sections of a rope. None where positions are one number."""
    if family.rope_sections is None:
        return None
    given = raw.get("mrope_section") or family.rope_sections
    if not isinstance(given, list | tuple) or len(given) != 3 or not all(isinstance(n, int) for n in given):
        raise UnsupportedModel(f"{fields.source}: mrope_section must be three whole numbers, found {given!r}")
    if raw.get("mrope_interleaved") is False:
        raise UnsupportedModel(f"{fields.source}: mrope_interleaved is false, which is not supported")
    time, height, width = given
    return time, height, width


def _type(fields: ConfigFields, family: Family, raw: Config) -> str:
    kind: Any = raw.get("rope_type") or raw.get("type") or "default"
    kind = family.rope_names.get(kind, kind)
    supported = dict.fromkeys([*ROPE_TYPES, *family.rope_names.values()])
    if kind not in supported:
        raise UnsupportedModel(
            f"{fields.source}: rope type {kind!r} is not supported; supported: {', '.join(supported)}"
        )
    for name in NEEDED.get(kind, []):
        if name not in raw:
            raise UnsupportedModel(f"{fields.source}: rope type {kind!r} needs the field {name!r}")
    return kind
