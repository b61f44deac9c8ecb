"""Kind and size of picture files, by their headers: PNG, JPEG, WebP and GIF. Pixels are not unpacked.

A file that is cut short is found where its format says so; other damage is found when it is decoded.
"""

from __future__ import annotations

from typing import NamedTuple

from palestra.util.png import PNG

PNG_END = b"IEND\xaeB`\x82"
JPEG, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of segments that say the size."""
JPEG_BARE = frozenset((0x01, *range(0xD0, 0xD9)))
"""Markers without a segment."""
JPEG_PIXELS = 0xDA


class BadPicture(ValueError):
    """A file is no picture that can be read; the text completes "a picture of … bytes"."""


class PictureHeader(NamedTuple):
    media_type: str
    width: int
    height: int


def read_header(data: bytes) -> PictureHeader:
    """Raises BadPicture."""
    try:
        header = _header(data)
    except IndexError:
        raise BadPicture("is cut short") from None
    if not header.width or not header.height:
        raise BadPicture("has no pixels")
    return header


def _header(data: bytes) -> PictureHeader:
    if data.startswith(PNG):
        if PNG_END not in data[-4096:]:  # some writers add a few bytes behind the end
            raise BadPicture("is cut short")
        return PictureHeader("image/png", _big(data, 16, 4), _big(data, 20, 4))
    if data.startswith(JPEG):
        if data.rfind(JPEG_END) < 0:
            raise BadPicture("is cut short")
        return _jpeg(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        if _little(data, 4, 4) + 8 > len(data):
            raise BadPicture("is cut short")
        return _webp(data)
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return PictureHeader("image/gif", _little(data, 6, 2), _little(data, 8, 2))
    raise BadPicture("is no PNG, JPEG, WebP or GIF file")


def _jpeg(data: bytes) -> PictureHeader:
    at = 2
    while True:
        if data[at] != 0xFF:
            raise BadPicture("is damaged: a JPEG file has no marker where one should be")
        marker = data[at + 1]
        if marker == 0xFF:  # filling
            at += 1
        elif marker in JPEG_BARE:
            at += 2
        elif marker in JPEG_SIZES:
            return PictureHeader("image/jpeg", _big(data, at + 7, 2), _big(data, at + 5, 2))
        elif marker == JPEG_PIXELS:
            raise BadPicture("is damaged: a JPEG file does not say its size")
        else:
            at += 2 + _big(data, at + 2, 2)


def _webp(data: bytes) -> PictureHeader:
    match data[12:16]:
        case b"VP8X":
            return PictureHeader("image/webp", 1 + _little(data, 24, 3), 1 + _little(data, 27, 3))
        case b"VP8L":
            bits = _little(data, 21, 4)
            return PictureHeader("image/webp", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
        case b"VP8 ":
            return PictureHeader("image/webp", _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF)
        case _:
            raise BadPicture("is damaged: a WebP file has no pixels")


def _big(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(_slice(data, at, size), "big")


def _little(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(_slice(data, at, size), "little")


def _slice(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise IndexError(at)
    return data[at : at + size]
