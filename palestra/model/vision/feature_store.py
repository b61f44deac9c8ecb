"""Features of pictures, computed once and kept by the pictures' digests while there is room.

A sampler's prompts, the samples of a group and the training pass behind them read the same rows. Whatever was dropped
is computed again, to the same bits.
"""

from __future__ import annotations

from collections import OrderedDict

from palestra.model.vision.features import Features, Tower
from palestra.types import Picture

STORE_BYTES = 1 << 28


class FeatureStore:
    def __init__(self, tower: Tower, size_bytes: int = STORE_BYTES):
        self.tower, self.size_bytes = tower, size_bytes
        self.used_bytes = self.computed = 0
        """Bytes of what is kept; how often the tower has run."""
        self._kept: OrderedDict[str, Features] = OrderedDict()
        """The least recently used first."""

    def __contains__(self, picture: Picture) -> bool:
        return picture.digest in self._kept

    def of(self, picture: Picture) -> Features:
        found = self._kept.get(picture.digest)
        if found is not None:
            self._kept.move_to_end(picture.digest)
            return found
        found = self._kept[picture.digest] = self.tower(picture)
        self.computed += 1
        self.used_bytes += found.size_bytes
        while self.used_bytes > self.size_bytes and len(self._kept) > 1:
            self.used_bytes -= self._kept.popitem(last=False)[1].size_bytes
        return found
