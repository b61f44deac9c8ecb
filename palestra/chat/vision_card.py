"""Reads how a model's pictures are resized, and which token stands for them."""

from __future__ import annotations

from pathlib import Path

from palestra.chat.pictures import PictureTokens
from palestra.chat.tokenizer_files import read_json_file
from palestra.types import VisionCard

PIXELS = (65536, 16777216)
"""The fewest and most pixels of a picture where the folder does not say it: those of Qwen3-VL and Qwen3.5."""
MERGE = 2


def read_card(folder: Path, tokens: PictureTokens | None) -> VisionCard | None:
    """Reads the folder's card. None if its model reads text only. Raises ChatError."""
    tower = read_json_file(folder / "config.json").get("vision_config")
    if tokens is None or not isinstance(tower, dict) or "patch_size" not in tower:
        return None
    size = read_json_file(folder / "preprocessor_config.json").get("size") or {}
    return VisionCard(
        multiple=int(tower["patch_size"]) * int(tower.get("spatial_merge_size", MERGE)),
        min_pixels=int(size.get("shortest_edge", PIXELS[0])),
        max_pixels=int(size.get("longest_edge", PIXELS[1])),
        image_token=tokens.image_id,
    )
