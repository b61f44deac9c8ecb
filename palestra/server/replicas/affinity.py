"""Finds the server that has a conversation: the one that sampled the tokens at the beginning of a prompt has their keys
and values cached.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 16
MAX_ENDS = 100_000  # sequences remembered; about 200 bytes each

End = tuple[int, tuple[int, ...]]
"""The end of a sequence: a hash of all its whole blocks, and the tokens after them."""


class Affinity:
    def __init__(self, max_ends: int = MAX_ENDS):
        self._homes: OrderedDict[End, int] = OrderedDict()
        """Servers by end of a sequence, the least recently used first."""
        self._hashes: Counter[int] = Counter()
        """Hashes of the ends: most blocks of a prompt are not among them."""
        self._max_ends = max_ends

    def note(self, sequence: Sequence[int], server: int) -> None:
        """Notes that a prompt with its answer was sampled at this server."""
        *_, (position, block_hash) = _blocks(sequence)
        end = (block_hash, tuple(sequence[position:]))
        if end not in self._homes:
            self._hashes[block_hash] += 1
        self._homes[end] = server
        self._homes.move_to_end(end)
        if len(self._homes) > self._max_ends:
            (oldest, _), _ = self._homes.popitem(last=False)
            self._hashes[oldest] -= 1
            if not self._hashes[oldest]:
                del self._hashes[oldest]

    def home(self, prompt: Sequence[int]) -> int | None:
        """Returns the server of the longest known sequence that the prompt begins with."""
        for position, block_hash in reversed([b for b in _blocks(prompt) if b[1] in self._hashes]):
            for length in range(BLOCK - 1, -1, -1):
                end = (block_hash, tuple(prompt[position : position + length]))
                if len(end[1]) == length and end in self._homes:
                    self._homes.move_to_end(end)
                    return self._homes[end]
        return None


def _blocks(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields position and hash at the start and after each whole block."""
    block_hash = 0
    yield 0, block_hash
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block_hash = hash((block_hash, tuple(tokens[start : start + BLOCK])))
        yield start + BLOCK, block_hash
