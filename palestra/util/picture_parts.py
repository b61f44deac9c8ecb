"""Parts of messages that show pictures, in the forms that APIs and datasets have."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from palestra.util.json_types import JsonMapping, JsonObject

PICTURE_PARTS = ("image_url", "input_image", "image")
DATA, FILE = "data:", "file:"


def is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PICTURE_PARTS


def has_pictures(messages: Sequence[Any]) -> bool:
    contents = (one.get("content") for one in messages if isinstance(one, Mapping))
    return any(isinstance(content, list) and any(map(is_picture, content)) for content in contents)


def url_part(url: str) -> JsonObject:
    return {"type": "image_url", "image_url": {"url": url}}


def url_of(part: JsonMapping) -> object:
    """The URL of a part that is a picture, wherever its kind has it; None where it has none."""
    found = next((part[key] for key in ("image_url", "image", "url", "path") if part.get(key) is not None), None)
    return found.get("url") if isinstance(found, Mapping) and "url" in found else found


def data_url(data: bytes, media_type: str) -> str:
    return f"{DATA}{media_type};base64,{base64.b64encode(data).decode()}"


def file_path(url: str) -> Path:
    """The file that a `file:` URL names."""
    return Path(url2pathname(urlsplit(url).path))
