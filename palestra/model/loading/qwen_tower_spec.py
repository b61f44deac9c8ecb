"""The vision tower of Qwen3-VL and Qwen3.5: its shape, read from `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.config_fields import Config, ConfigFields
from palestra.model.loading.tower_spec import CHANNELS, TowerSpec, image_processor, vision_fields
from palestra.types.pictures import PictureSizes


@dataclass(frozen=True, slots=True)
class TowerDefaults:
    """What an absent field means to a family's transformers classes."""

    image_token: int
    start_token: int
    end_token: int
    deepstack_layers: tuple[int, ...] = ()

    def read(self, config: Config, source: str) -> QwenTowerSpec | None:
        """Reads the vision tower's spec. None where the file has no tower."""
        return read_qwen_tower_spec(config, source, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenTowerSpec(TowerSpec):
    n_layers: int
    hidden_size: int
    inner_size: int
    n_heads: int
    patch: int
    """Side of a patch in pixels."""
    merge: int
    """Patches along each side of the square that becomes one position of the text model."""
    frames: int
    """Equal frames that a still picture stands for."""
    grid_side: int
    """Learned positions along each side; they are interpolated to a picture's patches."""
    rope_theta: float
    mean: tuple[float, float, float]
    """The mean of each channel, between 0 and 1, as is `std`."""
    std: tuple[float, float, float]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_heads

    @property
    def patch_size(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.frames * self.patch**2


def read_qwen_tower_spec(config: Config, source: str, defaults: TowerDefaults) -> QwenTowerSpec | None:
    fields = vision_fields(config, source, "hidden_act")
    if fields is None:
        return None
    if (channels := fields.get("in_channels", CHANNELS)) != CHANNELS:
        raise UnsupportedModel(f"{fields.source}: in_channels is {channels!r}; supported: {CHANNELS}")
    hidden, heads = fields.integer("hidden_size", 1152), fields.integer("num_heads", 16)
    if hidden % (4 * heads):
        raise UnsupportedModel(f"{fields.source}: hidden_size {hidden} gives {heads} heads no multiple of 4 numbers")
    positions = fields.integer("num_position_embeddings", 2304)
    n_layers, deep = fields.integer("depth", 27), fields.get("deepstack_visual_indexes", defaults.deepstack_layers)
    image, outer = image_processor(source), ConfigFields(config, source, {})
    return QwenTowerSpec(
        sizes=PictureSizes.of_config(config["vision_config"], image),
        n_layers=n_layers,
        hidden_size=hidden,
        inner_size=fields.integer("intermediate_size", 4304),
        n_heads=heads,
        patch=fields.integer("patch_size", 16),
        merge=fields.integer("spatial_merge_size", 2),
        frames=fields.integer("temporal_patch_size", 2),
        out_size=fields.integer("out_hidden_size", 3584),
        grid_side=int(positions**0.5),
        rope_theta=float((fields.get("rope_parameters") or {}).get("rope_theta", 10000.0)),
        deepstack_layers=tuple(deep) if defaults.deepstack_layers else (),
        image_token=outer.integer("image_token_id", defaults.image_token),
        start_token=outer.integer("vision_start_token_id", defaults.start_token),
        end_token=outer.integer("vision_end_token_id", defaults.end_token),
        mean=_channels(image, "image_mean"),
        std=_channels(image, "image_std"),
    )


def _channels(image: dict[str, Any], name: str) -> tuple[float, float, float]:
    red, green, blue = (float(x) for x in image.get(name) or (0.5, 0.5, 0.5))
    return red, green, blue
