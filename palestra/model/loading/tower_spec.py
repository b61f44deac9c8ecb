"""The vision tower of a model: its shape, read from `config.json`, and how pictures are prepared for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.config_fields import Config, ConfigFields

ACTIVATION = "gelu_pytorch_tanh"
PREPROCESSOR = "preprocessor_config.json"
CHANNELS = 3
PIXELS = (65536, 16777216)
"""The fewest and most pixels of a picture where the folder does not say it: those of Qwen3-VL and Qwen3.5."""


@dataclass(frozen=True, slots=True)
class TowerDefaults:
    """What an absent field means to a family's transformers classes."""

    image_token: int
    start_token: int
    end_token: int
    deepstack_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TowerSpec:
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
    out_size: int
    grid_side: int
    """Learned positions along each side; they are interpolated to a picture's patches."""
    rope_theta: float
    deepstack_layers: tuple[int, ...]
    """Layers whose results are added behind the text model's first layers, in this order."""
    image_token: int
    start_token: int
    end_token: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    """The mean of each channel, between 0 and 1, as is `std`."""
    std: tuple[float, float, float]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.n_heads

    @property
    def multiple(self) -> int:
        """Both sides of a picture are multiples of this many pixels."""
        return self.patch * self.merge

    @property
    def patch_size(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.frames * self.patch**2

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Positions of a picture from top to bottom, and from left to right."""
        return height // self.multiple, width // self.multiple


def read_tower_spec(config: Config, source: str, defaults: TowerDefaults) -> TowerSpec | None:
    """Reads the vision tower's spec. None where the file has no tower."""
    raw = config.get("vision_config")
    if raw is None or raw == {}:
        return None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{source}: field 'vision_config' must be an object, found {raw!r}")
    fields = ConfigFields(raw, f"{source} (vision_config)", {})
    if (found := fields.get("hidden_act", ACTIVATION)) != ACTIVATION:
        raise UnsupportedModel(f"{fields.source}: hidden_act is {found!r}; supported: {ACTIVATION!r}")
    if (channels := fields.get("in_channels", CHANNELS)) != CHANNELS:
        raise UnsupportedModel(f"{fields.source}: in_channels is {channels!r}; supported: {CHANNELS}")
    hidden, heads = fields.integer("hidden_size", 1152), fields.integer("num_heads", 16)
    if hidden % (4 * heads):
        raise UnsupportedModel(f"{fields.source}: hidden_size {hidden} gives {heads} heads no multiple of 4 numbers")
    positions = fields.integer("num_position_embeddings", 2304)
    n_layers, deep = fields.integer("depth", 27), fields.get("deepstack_visual_indexes", defaults.deepstack_layers)
    image = _preprocessor(source)
    size = image.get("size") or {}
    outer = ConfigFields(config, source, {})
    return TowerSpec(
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
        min_pixels=int(size.get("shortest_edge", PIXELS[0])),
        max_pixels=int(size.get("longest_edge", PIXELS[1])),
        mean=_channels(image, "image_mean"),
        std=_channels(image, "image_std"),
    )


def _preprocessor(source: str) -> dict[str, Any]:
    """Reads what the folder says of preparing pictures; empty without such a file."""
    file = Path(source).with_name(PREPROCESSOR)
    if not file.is_file():
        return {}
    try:
        raw = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UnsupportedModel(f"{file}: not valid JSON ({e}); copy the file again or delete it") from None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{file}: not a JSON object; copy the file again or delete it")
    return raw


def _channels(image: dict[str, Any], name: str) -> tuple[float, float, float]:
    red, green, blue = (float(x) for x in image.get(name) or (0.5, 0.5, 0.5))
    return red, green, blue
