"""Pictures as they travel to the engine: decoded, in RGB, of the size at which a tower reads them."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct

from palestra.util.json_types import JsonMapping
from palestra.util.png import is_resized, png_file

CHANNELS = 3
NAMED_DIGITS = 12  # of a digest, in messages
WIDEST = 200  # to one: what is longer is refused, as transformers does
QWEN_PIXELS = (65536, 16777216)
"""The fewest and most pixels of a picture where a folder does not say it: those of Qwen3-VL and Qwen3.5."""
PROCESSOR_FILES, PROCESSOR = ("preprocessor_config.json", "processor_config.json"), "image_processor"
"""Files of a folder that say how pictures are prepared: all of the first, or this field of the second."""
GEMMA4_TOWER, GEMMA4_POSITIONS = "gemma4_vision", 280
"""How configs name Gemma 4's tower; the most positions of a picture where a folder does not say it."""


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
        """A file of exactly these pixels, which are not resized when it is read again."""
        return png_file(self.pixels, self.height, self.width, is_resized=True)


class PlacedImage(Struct, frozen=True, array_like=True):
    """Where a picture stands in a prompt."""

    start: int
    """First position of the picture; its other rows follow."""
    digest: str


class Resizing(StrEnum):
    """How a family chooses the size at which its tower reads a picture."""

    NEAREST = "nearest"
    """Sides are rounded to multiples; only what has too many or too few pixels is made smaller or larger."""
    LARGEST = "largest"
    """Every picture becomes as large as the most pixels allow, in its shape."""


class PictureSizes(Struct, frozen=True, kw_only=True):
    """The sizes at which a model's tower reads pictures."""

    multiple: int
    """Both sides of a picture are multiples of this many pixels; each such square is one position."""
    min_pixels: int
    max_pixels: int
    resizing: Resizing = Resizing.NEAREST

    @classmethod
    def of_config(cls, tower: JsonMapping, processor: JsonMapping) -> PictureSizes:
        """`tower`: the `vision_config` of a model's config; `processor`: the fields of its image processor."""
        if tower.get("model_type") == GEMMA4_TOWER:
            multiple = int(tower.get("patch_size", 16)) * int(tower.get("pooling_kernel_size", 3))
            most = int(processor.get("max_soft_tokens") or GEMMA4_POSITIONS) * multiple**2
            return cls(multiple=multiple, min_pixels=0, max_pixels=most, resizing=Resizing.LARGEST)
        size = processor.get("size") or {}
        return cls(
            multiple=int(tower.get("patch_size", 16)) * int(tower.get("spatial_merge_size", 2)),
            min_pixels=int(size.get("shortest_edge", QWEN_PIXELS[0])),
            max_pixels=int(size.get("longest_edge", QWEN_PIXELS[1])),
        )

    def sides(self, height: int, width: int, *, is_resized: bool = False) -> tuple[int, int]:
        """Height and width that the tower reads of a picture. `is_resized`: its file says that it was read like that
        once. Raises UnfitPicture for what is much longer than wide."""
        if is_resized and self.has(height, width):
            return height, width
        if max(height, width) > WIDEST * min(height, width):
            raise UnfitPicture(f"it has {width} x {height} pixels; its sides may differ by a factor of {WIDEST}")
        return self._largest(height, width) if self.resizing is Resizing.LARGEST else self._nearest(height, width)

    def has(self, height: int, width: int) -> bool:
        """Whether a tower reads a picture of this size as it is."""
        return not height % self.multiple and not width % self.multiple and height * width <= self.max_pixels

    def rows(self, height: int, width: int) -> int:
        """Positions of a picture that has this size after it was resized."""
        return (height // self.multiple) * (width // self.multiple)

    def _nearest(self, height: int, width: int) -> tuple[int, int]:
        multiple = self.multiple
        own = [round(side / multiple) * multiple for side in (height, width)]
        if math.prod(own) > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            own = [max(multiple, math.floor(side / shrink / multiple) * multiple) for side in (height, width)]
        elif math.prod(own) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            own = [math.ceil(side * grow / multiple) * multiple for side in (height, width)]
        return own[0], own[1]

    def _largest(self, height: int, width: int) -> tuple[int, int]:
        factor = math.sqrt(self.max_pixels / (height * width))
        down, right = (math.floor(factor * side / self.multiple) for side in (height, width))
        longest = self.max_pixels // self.multiple**2
        if not down:
            down, right = 1, min(width // height, longest)
        elif not right:
            down, right = min(height // width, longest), 1
        return down * self.multiple, right * self.multiple


class VisionCard(Struct, frozen=True, kw_only=True):
    """What a server must know of a model that sees: how pictures are resized, and which tokens stand around them."""

    sizes: PictureSizes
    image_token: int
    """Id of the token that stands for each position of a picture in prompts."""
    start_token: int | None = None
    """Ids of the tokens before and behind a picture, where the family has some."""
    end_token: int | None = None

    def rows(self, picture: Picture) -> int:
        """Positions that a picture takes."""
        return self.sizes.rows(picture.height, picture.width)

    def rows_of_file(self, file: PictureFile) -> int:
        """Positions that a file's picture takes after it was resized. Raises UnfitPicture."""
        return self.sizes.rows(*self.sizes.sides(file.height, file.width, is_resized=is_resized(file.data)))


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
