"""Where rollouts come from: the one seam between the trainer and whoever plays.

Owns: the protocol. Local environments, remote episodes and gym servers stand behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from palestra.training.policy import Sampler
from palestra.types.rollouts import Group, GroupRequest


class RolloutSource(Protocol):
    def play(self, requests: Sequence[GroupRequest], sampler: Sampler) -> AsyncIterator[Group]:
        """Every requested group once, in the order they finish. A rollout that fails is a record in its group;
        only what makes further playing senseless is raised."""
        ...

    async def close(self) -> None: ...
