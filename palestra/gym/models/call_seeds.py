"""Derives a seed for each model call of a rollout from one for the whole rollout.

With one seed for all its calls, every turn would be sampled with the same random numbers: the result would not be a
sample of the policy any more, and an agent that asks the same question again would get the same answer for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from palestra.gym.wire import encoded
from palestra.util.json_types import JsonMapping

MOST_ROLLOUTS = 100_000  # at once; the least recently used one is forgotten first
SEED_BITS = 63  # engines take signed 64-bit seeds


class CallSeeds:
    def __init__(self, most: int = MOST_ROLLOUTS) -> None:
        self._calls: OrderedDict[str, int] = OrderedDict()
        self._most = most

    def next(self, rollout_seed: str, messages: Sequence[JsonMapping]) -> int:
        """Derives a seed from the call's number and, for a server that was restarted in the middle, from its messages;
        without ids of calls and tokens, so that a repeated run is the same."""
        number = self._calls.pop(rollout_seed, 0)
        self._calls[rollout_seed] = number + 1
        if len(self._calls) > self._most:
            self._calls.popitem(last=False)
        turns = [[one.get("role"), one.get("content")] for one in messages]
        digest = blake2b(encoded([rollout_seed, number, turns]), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
