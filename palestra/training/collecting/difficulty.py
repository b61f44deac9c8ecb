"""Chooses tasks by how often they are solved: skips those outside a band of pass rates, plays hard-won ones again.

All it knows is in `DifficultyState`, which is saved with the run's state, and changes only when a task's turn comes and
when a step is over: a resumed run chooses the same tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from palestra.config.difficulty import DifficultyConfig
from palestra.runs.run_state import DifficultyState, PassRate
from palestra.types.rollouts import Group, Task, is_usable

BY_TASK = "task"
MOST_SKIPS = 10_000
"""Tasks that are skipped in a row; the next one is played whatever its estimate, so that a run cannot hang."""


class DifficultyCounts(Struct):
    skipped: int = 0
    replayed: int = 0


class TaskFilter:
    def __init__(self, config: DifficultyConfig, success: float, state: DifficultyState) -> None:
        """`success` is the reward from which a rollout has passed; `state` is changed in place."""
        self._config, self._state = config, state
        self._success = success if config.success is None else config.success
        self._counts, self._skips_in_a_row = DifficultyCounts(), 0

    def wants(self, position: int, task: Task) -> bool:
        """Whether a group is played at this position of the order, whose turn has come: of this task, or of one that is
        replayed instead (`origin`)."""
        state = self._state
        if state.queue and state.replay_credit >= 1.0:
            state.replay_credit -= 1.0
            state.replayed[position] = state.queue.pop(0)
            self._counts.replayed += 1
            return True
        if self._is_skipped(task):
            self._counts.skipped += 1
            return False
        # Of n groups, n x share are replays: each of the others adds share / (1 - share).
        share = self._config.replay_share
        state.replay_credit = min(1.0, state.replay_credit + share / (1.0 - share))
        return True

    def origin(self, position: int) -> int:
        """Returns the position whose task is played at this one."""
        return self._state.replayed.get(position, position)

    def observe(self, groups: Sequence[Group]) -> None:
        """Learns from the groups of a step."""
        for group in groups:
            position = int(group.id.removeprefix("g"))
            origin = self._state.replayed.pop(position, position)
            graded = [one.reward for one in group.rollouts if one.is_graded and is_usable(one.reward)]
            if not graded:
                continue
            passes = sum((reward or 0.0) >= self._success for reward in graded)
            self._update(group.task, passes / len(graded))
            if self._config.replay_share and 0 < passes <= min(self._config.replay_passes, len(graded) - 1):
                self._queue(origin)

    def take_metrics(self) -> dict[str, float]:
        """Returns metrics since the last call."""
        counts, self._counts = self._counts, DifficultyCounts()
        rates = [one.estimate for one in self._state.rates.values()]
        outside = sum(not self._is_inside(rate) for rate in rates)
        return {
            "difficulty/skipped": float(counts.skipped),
            "difficulty/replayed": float(counts.replayed),
            "difficulty/waiting": float(len(self._state.queue)),
            "difficulty/known": float(len(rates)),
            "difficulty/outside_share": outside / len(rates) if rates else 0.0,
        }

    def _is_skipped(self, task: Task) -> bool:
        rate = self._state.rates.get(self._key(task))
        if rate is None or self._is_inside(rate.estimate) or self._skips_in_a_row >= MOST_SKIPS:
            self._skips_in_a_row = 0
            return False
        rate.skips = (rate.skips + 1) % self._config.recheck_every
        self._skips_in_a_row = self._skips_in_a_row + 1 if rate.skips else 0
        return rate.skips > 0

    def _is_inside(self, estimate: float) -> bool:
        return self._config.lowest <= estimate <= self._config.highest

    def _key(self, task: Task) -> str:
        if self._config.by == BY_TASK:
            return f"{task.environment}/{task.id}"
        return f"{task.environment}/{self._config.by}={task.extras.get(self._config.by)}"

    def _update(self, task: Task, passed: float) -> None:
        rate = self._state.rates.setdefault(self._key(task), PassRate(passed))
        decay = self._config.ema_decay
        rate.estimate = decay * rate.estimate + (1.0 - decay) * passed

    def _queue(self, origin: int) -> None:
        queue = self._state.queue
        if origin not in queue:
            queue.append(origin)
            del queue[: -self._config.replay_buffer_size]
