"""The state from which a run is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from palestra.rollouts.policy_sampler import PolicyError
from palestra.runs.best_step import best_step
from palestra.runs.run_state import RunState, read_state
from palestra.runs.writer import write_json
from palestra.training.policy import Policy


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
