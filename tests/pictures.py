"""Pictures for tests, as files: drawn from a seed, written by Pillow."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def drawn(seed: int = 0, width: int = 64, height: int = 48) -> Image.Image:
    """Some coloured squares."""
    rng = np.random.default_rng(seed)
    squares = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(squares.repeat(8, 0).repeat(8, 1))


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def damaged(seed: int = 0) -> bytes:
    """A PNG file whose header and end are whole, and whose pixels are not."""
    file = file_of(drawn(seed))
    middle = file.index(b"IDAT") + 12
    return file[:middle] + bytes(8) + file[middle + 8 :]


def pixels_of(file: bytes) -> bytes:
    return Image.open(io.BytesIO(file)).tobytes()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"
