"""Pictures as they travel to the engine: decoded, in RGB, of the size at which a tower reads them."""

from __future__ import annotations

import hashlib
import zlib

from msgspec import Struct

CHANNELS = 3


class Picture(Struct, frozen=True, kw_only=True):
    """A picture, decoded and resized. Equal pixels have equal digests, whatever file they came from."""

    digest: str
    """SHA-256 of size and pixels, in hexadecimal digits."""
    height: int
    width: int
    packed: bytes
    """The pixels, compressed by zlib."""

    @classmethod
    def of_pixels(cls, pixels: bytes, height: int, width: int) -> Picture:
        """`pixels`: rows of red, green and blue bytes."""
        if len(pixels) != height * width * CHANNELS:
            raise ValueError(f"{len(pixels)} bytes are no RGB picture of {width} x {height}")
        digest = hashlib.sha256(b"%d %d " % (height, width) + pixels).hexdigest()
        return cls(digest=digest, height=height, width=width, packed=zlib.compress(pixels, 1))

    @property
    def pixels(self) -> bytes:
        size = self.height * self.width * CHANNELS
        inflater = zlib.decompressobj()
        pixels = inflater.decompress(self.packed, size)
        if len(pixels) != size or inflater.unconsumed_tail:
            raise ValueError(f"picture {self.digest[:12]} does not have {self.width} x {self.height} pixels")
        return pixels


class PlacedImage(Struct, frozen=True, array_like=True):
    """Where a picture stands in a prompt."""

    start: int
    """Its first position; its other rows follow."""
    digest: str


class VisionCard(Struct, frozen=True, kw_only=True):
    """What a server must know of a model that sees: how pictures are resized, and which tokens stand around them."""

    multiple: int
    """Both sides of a picture are multiples of this many pixels; each such square is one position."""
    min_pixels: int
    max_pixels: int
    image_token: int
    """Id of the token that stands for each position of a picture in prompts."""
    start_token: int | None = None
    """Ids of the tokens before and behind a picture, where the family has some."""
    end_token: int | None = None

    def rows(self, picture: Picture) -> int:
        """Positions that a picture takes."""
        return (picture.height // self.multiple) * (picture.width // self.multiple)
