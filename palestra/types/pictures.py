"""Pictures as they travel to the engine: decoded, in RGB, of the size at which a tower reads them."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Sequence

from msgspec import Struct

from palestra.util.png import png_file

CHANNELS = 3
NAMED_DIGITS = 12  # of a digest, in messages
WIDEST = 200  # to one: what is longer is refused, as transformers does


class UnfitPicture(ValueError):
    """No tower reads a picture of this shape."""


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

    def png(self) -> bytes:
        """A file of exactly these pixels."""
        return png_file(self.pixels, self.height, self.width)


class PlacedImage(Struct, frozen=True, array_like=True):
    """Where a picture stands in a prompt."""

    start: int
    """First position of the picture; its other rows follow."""
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

    def rows_of_size(self, height: int, width: int) -> int:
        """Positions that a picture of this size takes after it was resized. Raises UnfitPicture."""
        return math.prod(resized_sides(height, width, self.multiple, self.min_pixels, self.max_pixels)) // (
            self.multiple**2
        )


def resized_sides(height: int, width: int, multiple: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width that a tower reads of a picture: multiples, close to its shape, neither too few pixels nor too
    many. Raises UnfitPicture for what is much longer than wide."""
    if max(height, width) > WIDEST * min(height, width):
        raise UnfitPicture(f"it has {width} x {height} pixels; its sides may differ by a factor of {WIDEST}")
    own = [round(side / multiple) * multiple for side in (height, width)]
    if math.prod(own) > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        own = [max(multiple, math.floor(side / shrink / multiple) * multiple) for side in (height, width)]
    elif math.prod(own) < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        own = [math.ceil(side * grow / multiple) * multiple for side in (height, width)]
    return own[0], own[1]


def short_name(digest: str) -> str:
    """How messages name a picture."""
    return digest[:NAMED_DIGITS]


class PictureFile(Struct, frozen=True, kw_only=True):
    """A picture as a file, as it came from a dataset or an environment."""

    digest: str
    """SHA-256 of the file, in hexadecimal digits."""
    data: bytes
    media_type: str
    """`image/png` and the like."""
    height: int
    width: int
    origin: str = ""
    """Where it stands, for messages: the row or the task, the part of the message, its path."""


class PromptPicture(Struct, frozen=True):
    """Where a file's picture stands among the tokens of a conversation."""

    start: int
    """First position of the picture; its others follow."""
    rows: int
    """Positions that it takes."""
    file: PictureFile

    @property
    def end(self) -> int:
        return self.start + self.rows


def origin_in(message: str, pictures: Iterable[PromptPicture]) -> str:
    """Where the first picture stands that a server's message names by its digest; empty if it names none of these."""
    return next((one.file.origin for one in pictures if short_name(one.file.digest) in message), "")


def whole_pictures(pictures: Sequence[PromptPicture], limit: int) -> tuple[int, list[PromptPicture]]:
    """Returns where a row may be cut at `limit` tokens or before so that no picture is divided, and the pictures before
    it."""
    cut = min((one.start for one in pictures if one.start < limit < one.end), default=limit)
    return cut, [one for one in pictures if one.end <= cut]
