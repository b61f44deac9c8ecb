"""Pictures in their places of a sequence: the ids of their rows, rope positions, and the features that a batch needs.

A picture's row has an id below 0 where text has a token: made of the picture's digest and the row's number, so that
whatever compares tokens (shared prefixes, pages of the cache) finds equal pictures and only these.

Such ids are clamped before an embedding, and compared like tokens. Lists of tokens in runs have the family's image
token there and `pictures` beside them: whatever cuts, joins or compares such lists does so with both
(`types/pictures.whole_pictures`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.errors import DataError
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.tower_spec import TowerSpec
from palestra.model.transfers import to_device
from palestra.model.vision.feature_store import FeatureStore
from palestra.types import Picture, PlacedImage

ID_BITS = 61
FIRST_ID = -(1 << 62)
"""Ids of rows are from here on, and far below -1, which stands for a pending token."""


@dataclass(frozen=True, slots=True)
class PictureRows:
    """What a batch has of pictures, for the decoder."""

    places: Tensor
    """Rows of the batch, each named once."""
    features: Tensor
    """[places, hidden]: these stand there in place of embeddings."""
    deepstack: tuple[Tensor, ...]
    """[places, hidden] each: added behind the first layers."""

    def enter(self, hidden: Tensor) -> Tensor:
        return hidden.index_copy(0, self.places, self.features.to(hidden.dtype))

    def add_behind(self, layer: int, update: Tensor) -> Tensor:
        """Returns what a layer adds to the residual stream, with what pictures add behind it."""
        if layer >= len(self.deepstack):
            return update
        return update.index_add(0, self.places, self.deepstack[layer].to(update.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPictures:
    """The pictures of one sequence."""

    pictures: tuple[Picture, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    """Positions that each takes."""
    positions: NDArray[np.int64]
    """[length, 3]: time, height and width of each position of the prompt."""
    shift: int
    """What is to be added to the place of a token behind the prompt to have its position."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Rows (first, and behind the last) that see each other in layers with a window: those of a picture, and of others
    right behind it. Only in families whose pictures look ahead."""

    @classmethod
    def of(cls, spec: TowerSpec, placed: Sequence[tuple[int, Picture]], length: int) -> PlacedPictures:
        """`placed`: first positions, with their pictures. Raises DataError where these overlap or do not fit."""
        positions = np.empty((length, 3), np.int64)
        counts, at, following = [], 0, 0
        blocks: list[tuple[int, int]] = []
        for start, picture in sorted(placed, key=lambda pair: pair[0]):
            down, right = spec.grid(picture.height, picture.width)
            if down * right == 0 or picture.height % spec.multiple or picture.width % spec.multiple:
                raise DataError(
                    f"picture {picture.digest[:12]} has {picture.width} x {picture.height} pixels; both sides must be "
                    f"multiples of {spec.multiple}"
                )
            if start < at or start + down * right > length:
                raise DataError(
                    f"picture {picture.digest[:12]} takes {down * right} positions from {start} on, which overlaps "
                    f"another one or the end of the {length} positions"
                )
            text = start - at
            positions[at:start] = (following + np.arange(text))[:, None]
            following += text
            grid = np.indices((down, right)).reshape(2, -1).T
            if spec.has_plane_positions:
                positions[start : start + down * right, 0] = following
                positions[start : start + down * right, 1:] = following + grid
                following += max(down, right)
            else:
                positions[start : start + down * right] = (following + np.arange(down * right))[:, None]
                following += down * right
            joins = bool(blocks) and blocks[-1][1] == start
            counts.append(down * right)
            at = start + down * right
            blocks.append((blocks.pop()[0] if joins else start, at))
        positions[at:] = (following + np.arange(length - at))[:, None]
        ordered = sorted(placed, key=lambda pair: pair[0])
        shift = following - at
        return cls(
            tuple(picture for _, picture in ordered),
            tuple(start for start, _ in ordered),
            tuple(counts),
            positions,
            shift,
            tuple(blocks) if spec.looks_ahead else (),
        )

    def with_ids(self, tokens: Iterable[int]) -> list[int]:
        """The prompt's tokens, with the ids of rows where pictures stand. Rows that see each other have ids of all
        pictures among them."""
        ids, placed = list(tokens), list(zip(self.pictures, self.starts, self.counts, strict=True))
        for picture, start, count in placed:
            ids[start : start + count] = row_ids(picture.digest, count)
        for first, end in self.blocks:
            digests = [picture.digest for picture, start, _ in placed if first <= start < end]
            if len(digests) > 1:
                joined = hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()
                ids[first:end] = row_ids(joined, end - first)
        return ids

    def ahead(self, start: int, end: int) -> NDArray[np.int64]:
        """[end - start]: how many rows behind itself each of these sees, in layers with a window."""
        found = np.zeros(end - start, np.int64)
        for first, last in self.blocks:
            low, high = max(first, start), min(last, end)
            if low < high:
                found[low - start : high - start] = last - 1 - np.arange(low, high)
        return found

    def whole_end(self, start: int, end: int, *, must_move: bool) -> int:
        """Where a chunk from `start` on may end, at `end` or before, so that rows which see each other are computed
        together; behind `end` if there is no such place and it `must_move`."""
        for first, last in self.blocks:
            if first < end < last:
                return first if first > start else last if must_move else start
        return end

    def rope_positions(self, start: int, end: int) -> NDArray[np.int64]:
        """[end - start, 3]"""
        known = self.positions[start:end]
        if end <= len(self.positions):
            return known
        behind = np.arange(max(start, len(self.positions)), end) + self.shift
        return np.concatenate([known, np.repeat(behind[:, None], 3, 1)])


@lru_cache(maxsize=1024)
def row_ids(digest: str, count: int) -> tuple[int, ...]:
    """Ids of a picture's rows. Two pictures would need equal hashes in every row to be taken for one another."""
    numbers = np.frombuffer(hashlib.shake_256(bytes.fromhex(digest)).digest(8 * count), "<u8") >> (64 - ID_BITS)
    return tuple((numbers.astype(np.int64) + FIRST_ID).tolist())


def place_pictures(
    spec: ModelSpec, images: Sequence[PlacedImage], pictures: Mapping[str, Picture], length: int
) -> PlacedPictures:
    """Raises DataError where the model reads text only, or a picture does not fit or was not sent."""
    placed = [(image.start, _found(image.digest, spec, pictures)) for image in images]
    assert spec.tower is not None
    return PlacedPictures.of(spec.tower, placed, length)


def picture_rows(digest: str, spec: ModelSpec, pictures: Mapping[str, Picture]) -> int:
    """Positions that a picture takes. Raises DataError as `place_pictures` does."""
    picture = _found(digest, spec, pictures)
    assert spec.tower is not None
    return math.prod(spec.tower.grid(picture.height, picture.width))


def _found(digest: str, spec: ModelSpec, pictures: Mapping[str, Picture]) -> Picture:
    if spec.tower is None:
        raise DataError(f"picture {digest[:12]}: {spec.architecture} reads text only here; send tokens")
    if digest not in pictures:
        raise DataError(f"picture {digest[:12]} stands among the tokens, but was not sent with the request")
    return pictures[digest]


class BatchPictures:
    """The pictures of a batch: their features are numbered end to end."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._pictures: list[Picture] = []
        self._rows = 0

    def index(self, placed: PlacedPictures | None, start: int, end: int) -> NDArray[np.int64]:
        """The feature of each position from `start` to `end`; -1 for text."""
        index = np.full(end - start, -1, np.int64)
        if placed is None:
            return index
        for picture, at, count in zip(placed.pictures, placed.starts, placed.counts, strict=True):
            low, high = max(at, start), min(at + count, end)
            if low < high:
                first = self._number(picture, count)
                index[low - start : high - start] = first + np.arange(low - at, high - at)
        return index

    def _number(self, picture: Picture, count: int) -> int:
        if picture.digest not in self._first:
            self._first[picture.digest] = self._rows
            self._pictures.append(picture)
            self._rows += count
        return self._first[picture.digest]

    def rows(self, index: NDArray[np.int64], store: FeatureStore, device: torch.device) -> PictureRows | None:
        """Returns the rows of pictures for the decoder; None where all rows are text."""
        places = np.flatnonzero(index >= 0)
        if not len(places):
            return None
        found = [store.of(picture) for picture in self._pictures]
        wanted = to_device(index[places], device)

        def taken(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(parts)).index_select(0, wanted)

        return PictureRows(
            to_device(places, device),
            taken([features.rows for features in found]),
            tuple(taken(parts) for parts in zip(*(features.deepstack for features in found), strict=True)),
        )


def sequence_positions(placed: PlacedPictures | None, start: int, end: int) -> NDArray[np.int64]:
    """[end - start, 3]: rope positions of a sequence, which may have no pictures."""
    if placed is not None:
        return placed.rope_positions(start, end)
    return np.repeat(np.arange(start, end)[:, None], 3, 1)
