"""PNG files, written without a library."""

from __future__ import annotations

import struct
import zlib

PNG = b"\x89PNG\r\n\x1a\n"


def png_file(pixels: bytes, height: int, width: int, *, is_resized: bool = False) -> bytes:
    """`pixels`: rows of red, green and blue bytes. `is_resized`: they are those that a model read, and the file says
    so."""
    row = 3 * width
    lines = b"".join(b"\0" + pixels[start : start + row] for start in range(0, height * row, row))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    note = _RESIZED if is_resized else b""
    return PNG + _chunk(b"IHDR", head) + note + _chunk(b"IDAT", zlib.compress(lines, 6)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


_RESIZED = _chunk(b"tEXt", b"Palestra\0resized for its model")


def is_resized(file: bytes) -> bool:
    """Whether it is a file of `png_file` with the pixels that a model read."""
    return file.startswith(PNG) and file[len(PNG) + 25 :].startswith(_RESIZED)
