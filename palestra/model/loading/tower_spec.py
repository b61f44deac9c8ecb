"""What the text model must know of a vision tower, whatever the family: see `TowerSpec`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.config_fields import Config, ConfigFields
from palestra.types.pictures import PROCESSOR, PROCESSOR_FILES, PictureSizes

ACTIVATION = "gelu_pytorch_tanh"
CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """How pictures are prepared, and how their rows stand among tokens; families add the tower's own shape."""

    sizes: PictureSizes
    out_size: int
    """Width of the rows that it returns."""
    image_token: int
    start_token: int
    end_token: int
    has_plane_positions: bool = True
    """Rows of a picture have positions of three numbers; otherwise theirs are those of text."""
    looks_ahead: bool = False
    """Rows of a picture see each other in layers with a window, also those that follow."""
    deepstack_layers: tuple[int, ...] = ()
    """Layers whose results are added behind the text model's first layers, in this order."""

    @property
    def multiple(self) -> int:
        """Both sides of a picture are multiples of this many pixels."""
        return self.sizes.multiple

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Positions of a picture from top to bottom, and from left to right."""
        return height // self.multiple, width // self.multiple


def vision_fields(config: Config, source: str, activation: str) -> ConfigFields | None:
    """The fields of `vision_config`, whose activation (in the field of this name) must be the one that is supported.
    None where the file has no tower."""
    raw = config.get("vision_config")
    if raw is None or raw == {}:
        return None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{source}: field 'vision_config' must be an object, found {raw!r}")
    fields = ConfigFields(raw, f"{source} (vision_config)", {})
    if (found := fields.get(activation, ACTIVATION)) != ACTIVATION:
        raise UnsupportedModel(f"{fields.source}: {activation} is {found!r}; supported: {ACTIVATION!r}")
    return fields


def image_processor(source: str) -> dict[str, Any]:
    """Reads what the folder of `source` says of preparing pictures; empty where it says nothing."""
    older, newer = (_read(Path(source).with_name(name)) for name in PROCESSOR_FILES)
    return older or newer.get(PROCESSOR) or {}


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        raw = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UnsupportedModel(f"{file}: not valid JSON ({e}); copy the file again or delete it") from None
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{file}: not a JSON object; copy the file again or delete it")
    return raw
