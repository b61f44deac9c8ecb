"""Reads how a model's pictures are resized, and which token stands for them."""

from __future__ import annotations

from pathlib import Path

from palestra.chat.pictures import PictureTokens
from palestra.chat.tokenizer_files import read_json_file
from palestra.types import VisionCard
from palestra.types.pictures import PROCESSOR, PROCESSOR_FILES, PictureSizes


def read_card(folder: Path, tokens: PictureTokens | None) -> VisionCard | None:
    """Reads the folder's card. None if its model reads text only. Raises ChatError."""
    tower = read_json_file(folder / "config.json").get("vision_config")
    if tokens is None or not isinstance(tower, dict) or "patch_size" not in tower:
        return None
    older, newer = (read_json_file(folder / name) for name in PROCESSOR_FILES)
    processor = older or newer.get(PROCESSOR) or {}
    return VisionCard(sizes=PictureSizes.of_config(tower, processor), image_token=tokens.image_id)
