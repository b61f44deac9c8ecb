"""The status of an engine: the table in docs/compatibility.md as functions."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from palestra.types.episodes import RunInfo
from palestra.types.tinkerscript import ENGINE_MOVES, EngineStatus

S = EngineStatus
FED_S = 300.0  # a trainer between two steps has nothing open; saving a large model takes minutes
Weights = tuple[int, str | None]


class FedRuns:
    """Runs whose trainer seems to be active."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._heard: dict[tuple[str, str], float] = {}
        """When a trainer last did something with its run, by owner and run."""

    def note_feeding(self, owner: str, run: str) -> None:
        self._heard[owner, run] = self._clock()

    def forget(self, owner: str, run: str) -> None:
        self._heard.pop((owner, run), None)

    def of(self, owner: str, runs: Iterable[RunInfo], set_aside: Container[str]) -> list[RunInfo]:
        """Returns the active runs. Those in `set_aside` count only once their trainer is heard of again."""
        return [run for run in runs if self._is_fed(run, self._heard.get((owner, run.run)), run.run in set_aside)]

    def _is_fed(self, run: RunInfo, heard_at: float | None, is_aside: bool) -> bool:
        if heard_at is None:
            return not is_aside and has_episodes(run)
        return has_episodes(run) or self._clock() - heard_at < FED_S


def has_begun(run: RunInfo, before: Weights) -> bool:
    """Whether a training process has passed its start. `before` are the weights that its run had then."""
    return (run.version, run.model) != before and has_episodes(run)


def has_episodes(run: RunInfo) -> bool:
    """Whether a run has episodes that are queued, played, or not committed yet."""
    return bool(run.queued or run.leased or run.ended or run.parked) or run.delivered > run.committed


def of_runs(fed: Iterable[RunInfo]) -> EngineStatus:
    """Returns the status that follows from active runs."""
    paused = [run.is_paused for run in fed]
    if not paused:
        return S.OFFLINE
    return S.WEIGHT_SYNCING if all(paused) else S.ROLLING


def why_not(now: EngineStatus, status: EngineStatus) -> str:
    """Returns why the status may not change like this; empty: it may."""
    if status is now or status in ENGINE_MOVES[now]:
        return ""
    return f"the engine is {now}; it can become {' or '.join(sorted(ENGINE_MOVES[now]))}, not {status}"
