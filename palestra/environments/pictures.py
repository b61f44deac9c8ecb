"""Pictures in the messages of environments."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Protocol

from palestra.util.json_types import JsonObject
from palestra.util.picture_headers import read_header
from palestra.util.picture_parts import data_url, url_part


class DrawnPicture(Protocol):
    """A picture as Pillow has it."""

    def save(self, fp: Any, format: str) -> object: ...  # noqa: A002 - Pillow's name


def image_part(image: bytes | str | Path | DrawnPicture) -> JsonObject:
    """Returns the part of a message that shows a picture: the bytes of a PNG, JPEG, WebP or GIF file, the path of one,
    or a picture of Pillow. Raises BadPicture, OSError."""
    if isinstance(image, str | Path):
        image = Path(image).read_bytes()
    elif not isinstance(image, bytes):
        file = io.BytesIO()
        image.save(file, "PNG")
        image = file.getvalue()
    return url_part(data_url(image, read_header(image).media_type))
