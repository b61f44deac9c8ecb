"""The state from which a run is resumed.

Owns: the pointer files in `checkpoints/`, keeping the newest and the best. Never touches: weights, which the server
stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from palestra.runs.best_step import best_step
from palestra.runs.writer import write_json
from palestra.training.policy import Policy, PolicyError


class StateError(ValueError):
    """A checkpoint cannot be read; the message says which."""


class PassRate(msgspec.Struct):
    """The moving estimate of how often a task is solved, or tasks that share one."""

    estimate: float
    skips: int = 0
    """How often its turn came and was skipped, since it was last played."""


class DifficultyState(msgspec.Struct, kw_only=True):
    """What a run knows about the difficulty of its tasks."""

    rates: dict[str, PassRate] = {}
    """Estimates by task, or by what tasks share."""
    queue: list[int] = []
    """Positions of tasks that wait to be replayed."""
    replayed: dict[int, int] = {}
    """Positions at which another position's task is played, as far as they are not used yet."""
    replay_credit: float = 0.0
    """A task is replayed whenever this reaches 1."""


class RunState(msgspec.Struct, kw_only=True):
    step: int = 0
    """Number of steps done; also the version of the weights."""
    kept_steps: int = 0
    """Number of them that kept their gradient instead of an optimizer step: schedules do not count these."""
    position: int = 0
    """Position in the order of tasks or data."""
    pending: list[int] = []
    """Earlier positions that were begun and not used (asynchronous runs)."""
    address: str = ""
    """Address of weights and optimizer on the server."""
    evaluated: int = -1
    """The last step whose weights were evaluated."""
    best: float | None = None
    """Best value of the metric that may end the run early."""
    evaluations_since_best: int = 0
    cursor: int = 0
    """Position in the log of played groups, if rollouts are episodes: everything up to it is in these weights, or set
    aside."""
    teachers: dict[str, str] = {}
    """Checkpoints that the names of teachers meant when the run began, such as RUN@12 for RUN@best."""
    difficulty: DifficultyState = msgspec.field(default_factory=DifficultyState)
    """Empty unless the config chooses tasks by their difficulty."""
    entropy_bonus: float | None = None
    """Coefficient of the entropy bonus as it was adapted so far; None if the config has no target for the entropy."""


class RunCheckpoints:
    def __init__(
        self, folder: Path, keep: int, keep_best: str | None = None, values: Mapping[int, float] | None = None
    ) -> None:
        """`values`: what the metric `keep_best` was in evaluations of earlier attempts, by step. Of steps without a
        checkpoint they do not count: those are done again."""
        self._folder, self._keep, self.keep_best = folder, keep, keep_best
        saved = {_step_of(file) for file in self._files()}
        self._values = {step: value for step, value in (values or {}).items() if step in saved}

    def rate(self, step: int, value: float) -> None:
        """Notes what the metric `keep_best` is for the weights of a step, before they are saved or afterwards."""
        self._values[step] = value

    def is_best(self, step: int) -> bool:
        """Whether the weights of this step are at least as good as all that are kept."""
        return self._best({step, *map(_step_of, self._files())}) == step

    async def save(self, state: RunState, policy: Policy) -> str:
        """Saves the weights, then the pointer to them: a kill in between leaves the older pointer, which is still
        valid."""
        state.address = await policy.save(f"step_{state.step:06d}")
        write_json(self._file(state), msgspec.to_builtins(state))
        await self.delete_old(policy)
        return state.address

    async def delete_old(self, policy: Policy) -> None:
        """Deletes all but the newest and the best, pointers first: whatever a pointer names exists."""
        files = self._files()
        best = self._best(map(_step_of, files))
        for old in [file for file in files[: -self._keep] if _step_of(file) != best]:
            address = read_state(old).address
            old.unlink()
            try:
                await policy.delete(address)
            except PolicyError:
                pass  # it belongs to another server or is gone: nothing points to it any more

    def amend(self, state: RunState) -> bool:
        """Adds to a saved state what became known later; returns False if the step was not saved."""
        if not (file := self._file(state)).exists():
            return False
        write_json(file, msgspec.to_builtins(state))
        return True

    def newest(self) -> RunState | None:
        files = self._files()
        return read_state(files[-1]) if files else None

    def _best(self, steps: Iterable[int]) -> int | None:
        """The best of these steps, as far as they were evaluated."""
        if self.keep_best is None:
            return None
        return best_step({step: self._values[step] for step in steps if step in self._values}, self.keep_best)

    def _file(self, state: RunState) -> Path:
        return self._folder / f"step_{state.step:06d}.json"

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("step_*.json"))


def _step_of(file: Path) -> int:
    return int(file.stem.removeprefix("step_"))


def read_state(file: Path) -> RunState:
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunState)
    except (OSError, msgspec.DecodeError) as error:
        raise StateError(
            f"{file} cannot be read as a checkpoint ({error}); remove it to resume from an older one"
        ) from None
