"""The vision tower of Gemma 4: its shape, read from `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.config_fields import Config, ConfigFields
from palestra.model.loading.tower_spec import CHANNELS, TowerSpec, image_processor, vision_fields
from palestra.types.pictures import GEMMA4_TOWER, PictureSizes

IMAGE, START, END = 258_880, 255_999, 258_882
"""Tokens of pictures, where the file does not name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaTowerSpec(TowerSpec):
    n_layers: int
    hidden_size: int
    inner_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    patch: int
    """Side of a patch in pixels."""
    pool: int
    """Patches along each side of the square whose mean becomes one position of the text model."""
    table_size: int
    """Learned positions of each axis."""
    rope_theta: float
    norm_eps: float
    is_clipped: bool
    """What linear layers read and return is clamped to numbers of their own."""
    is_standardised: bool
    """Pooled features are shifted and scaled by numbers of their own."""

    @property
    def patch_size(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.patch**2


def read_gemma_tower_spec(config: Config, source: str) -> GemmaTowerSpec | None:
    """Reads the vision tower's spec. None where the file has no tower."""
    fields = vision_fields(config, source, "hidden_activation")
    if fields is None:
        return None
    if (kind := fields.get("model_type", GEMMA4_TOWER)) != GEMMA4_TOWER:
        raise UnsupportedModel(f"{fields.source}: model_type is {kind!r}; supported: {GEMMA4_TOWER!r}")
    if fields.flag("attention_bias"):
        raise UnsupportedModel(f"{fields.source}: attention_bias is true, which is not supported")
    text, outer = ConfigFields(config.get("text_config") or {}, source, {}), ConfigFields(config, source, {})
    if text.get("pad_token_id", 0) != 0:
        raise UnsupportedModel(f"{source}: pad_token_id must be 0, which stands for pictures in per-layer embeddings")
    head_dim = fields.integer("head_dim", 64)
    if head_dim % 4:
        raise UnsupportedModel(f"{fields.source}: head_dim {head_dim} is no multiple of 4")
    rope = fields.get("rope_parameters") or {}
    return GemmaTowerSpec(
        sizes=PictureSizes.of_config(config["vision_config"] | {"model_type": kind}, image_processor(source)),
        out_size=text.integer("hidden_size", 2304),
        image_token=outer.integer("image_token_id", IMAGE),
        start_token=outer.integer("boi_token_id", START),
        end_token=outer.integer("eoi_token_id", END),
        has_plane_positions=False,
        looks_ahead=text.get("use_bidirectional_attention") == "vision",
        n_layers=fields.integer("num_hidden_layers", 16),
        hidden_size=fields.integer("hidden_size", 768),
        inner_size=fields.integer("intermediate_size", 3072),
        n_heads=fields.integer("num_attention_heads", 12),
        n_kv_heads=fields.integer("num_key_value_heads", 12),
        head_dim=head_dim,
        patch=fields.integer("patch_size", 16),
        pool=fields.integer("pooling_kernel_size", 3),
        table_size=fields.integer("position_embedding_size", 10240),
        rope_theta=float(rope.get("rope_theta", 100.0)),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        is_clipped=fields.flag("use_clipped_linears"),
        is_standardised=fields.flag("standardize"),
    )
