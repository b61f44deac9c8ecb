"""Servers under test and the rows they compete in: who runs when, which peer value a row names."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness import Measure, Progress, Row, figure
from peers.tinker_server import OurServer, Processes

ELSEWHERE = "not of this run: {}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table."""

    what: str
    unit: str
    less_is_better: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)
    """For each shape."""
    target_ratio: float | None = None
    """To the first peer of this run, instead."""
    known: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """For each shape: a peer and its figure, from shared/peers.md."""


@dataclass(slots=True)
class Site:
    """A server under test."""

    name: str
    client: Any
    """Of the API that is measured."""
    shape: str
    quick: bool
    server: OurServer | None = None
    """None: a peer's, of which only the URL is known."""
    processes: Processes | None = None
    ready_gb: float | None = None
    """Memory when it was ready, before any request."""
    start_another: Callable[[], float] | None = None
    """Seconds from a new process to its first train step."""


Run = Callable[[Site], dict[str, float]]
"""Does the work once; a value for each figure, by its `what`. A figure this server cannot have is left out."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Run
    figures: tuple[Figure, ...]
    rounds: int = 3
    quick_rounds: int = 1
    """0: not in --quick."""
    warmups: int = 1
    shapes: tuple[str, ...] = ("tiny",)


@dataclass(slots=True)
class Contest:
    sites: list[Site]
    """Ours first."""
    rounds: int | None
    progress: Progress
    notes: list[str]
    has_failed: bool = False

    def run(self, case: Case) -> list[Row]:
        start, ours = time.monotonic(), self.sites[0]
        measured = self._alternate(case)
        rows = [
            row
            for one in case.figures
            if (row := self._row(one, f"{one.what} {ours.shape}".strip(), measured)) is not None
        ]
        figures = ", ".join(f"{row.what} {figure(row.ours.median)} {row.unit}" for row in rows)
        self.progress.say(f"{f'{case.name} {ours.shape}'.strip()}: {time.monotonic() - start:.0f} s: {figures}")
        return rows

    def _alternate(self, case: Case) -> dict[str, dict[str, Measure]]:
        """A B A B …, by site and figure. A site that fails is out of this row."""
        rounds = self.rounds or (max(1, case.quick_rounds) if self.sites[0].quick else case.rounds)
        values: dict[str, dict[str, list[float]]] = {site.name: defaultdict(list) for site in self.sites}
        for number in range(-case.warmups, rounds):
            for site in self.sites:
                if site.name not in values:
                    continue
                self.progress.doing(f"{case.name}, {site.name}, {'warm-up' if number < 0 else f'round {number + 1}'}")
                try:
                    with self._alone(site):
                        figures = case.run(site)
                except Exception as e:
                    self._failed(site, f"{case.name} {site.shape}: {site.name}: {type(e).__name__}: {e}")
                    del values[site.name]
                    continue
                for what, value in figures.items() if number >= 0 else ():
                    values[site.name][what].append(value)
        return {name: {w: Measure(tuple(v)) for w, v in whats.items()} for name, whats in values.items()}

    @contextlib.contextmanager
    def _alone(self, site: Site) -> Iterator[None]:
        """The others stand still, as far as their processes are known: an idle server may spin on a core."""
        others = [p for other in self.sites if other is not site and other.processes for p in other.processes.all()]
        for process in others:
            process.suspend()
        try:
            yield
        finally:
            for process in others:
                process.resume()

    def _row(self, one: Figure, what: str, measured: dict[str, dict[str, Measure]]) -> Row | None:
        ours, *peers = self.sites
        figures = measured.get(ours.name, {})
        if one.what not in figures:
            return None
        peer, value = None, None
        if peers:
            peer, value = peers[0].name, measured.get(peers[0].name, {}).get(one.what)
        elif ours.shape in one.known:
            who, known = one.known[ours.shape]
            peer, value = ELSEWHERE.format(who), Measure((known,))
        return Row(
            what,
            one.unit,
            figures[one.what],
            peer if value is not None else None,
            value,
            target_ratio=one.target_ratio if peers else None,
            target_value=one.targets.get(ours.shape),
            less_is_better=one.less_is_better,
        )

    def _failed(self, site: Site, text: str) -> None:
        self.has_failed = self.has_failed or site is self.sites[0]
        self.notes.append(f"failed: {text}")
        self.progress.say(f"failed: {text}")
