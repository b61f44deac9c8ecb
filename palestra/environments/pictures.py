"""Pictures in the messages of environments."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Protocol

from palestra.util.json_types import JsonObject
from palestra.util.picture_headers import read_header
from palestra.util.picture_parts import data_url, is_picture, url_part


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


def pictures_in(result: object) -> list[JsonObject]:
    """The parts of a tool's result that are pictures."""
    return [part for part in result if is_picture(part)] if isinstance(result, list) else []


def without_pictures(result: Any) -> Any:
    """A tool's result as text shows it: of one with pictures the texts alone."""
    return texts_of(result) or None if pictures_in(result) else result


def texts_of(content: Any) -> str:
    """The text of a message's content, or of a result with pictures."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or [] if part.get("type") == "text")
