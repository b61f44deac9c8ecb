"""Messages between the server and the process that decodes pictures."""

from __future__ import annotations

from msgspec import Struct

from palestra.types import Picture
from palestra.types.pictures import PictureSizes


class DecodeOrder(Struct, frozen=True, kw_only=True):
    file: bytes
    sizes: PictureSizes
    max_file_pixels: int
    """A file with more is refused before it is unpacked."""


class DecodeAnswer(Struct, frozen=True, kw_only=True):
    picture: Picture | None = None
    problem: str = ""
    """Why there is no picture, for whoever sent it."""
