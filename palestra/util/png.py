"""PNG files, written without a library."""

from __future__ import annotations

import struct
import zlib

PNG = b"\x89PNG\r\n\x1a\n"


def png_file(pixels: bytes, height: int, width: int) -> bytes:
    """`pixels`: rows of red, green and blue bytes."""
    row = 3 * width
    lines = b"".join(b"\0" + pixels[start : start + row] for start in range(0, height * row, row))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return PNG + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(lines, 6)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
