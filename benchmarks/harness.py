"""The shape every benchmark shares: arguments, alternating runs, one table, one JSON line.

    measured = alternate({"ours": run_ours, "peer": run_peer}, rounds=5)
    row = Row("sample tiny", "tok/s", measured["ours"], "peer", measured["peer"], target_ratio=2.0)
    report(Report("compute", machine(), versions(["torch"]), [row]), json_line=args.json)

Owns: how a figure is taken, compared and printed. Never touches: what is measured; it does not import torch.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Contender = Callable[[], float]
"""Does the whole work once, times itself, and returns the figure (tok/s, steps/s, …)."""

COLUMNS = ("what", "ours", "(spread)", "unit", "peer", "peer value", "(spread)", "ratio", "target", "met")


@dataclass(frozen=True, slots=True)
class Measure:
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> str:
        return f"{figure(min(self.values))}–{figure(max(self.values))}"


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    unit: str
    ours: Measure
    peer: str | None = None
    """Which peer, in which configuration; None: there is none to run here."""
    peer_value: Measure | None = None
    target_ratio: float | None = None
    target_value: float | None = None
    """In `unit`, for rows whose target is not a ratio."""
    less_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """Ratio of medians, turned so that above 1 ours is better."""
        if self.peer_value is None:
            return None
        ours, peer = self.ours.median, self.peer_value.median
        over, under = (peer, ours) if self.less_is_better else (ours, peer)
        return over / under if under else None

    @property
    def target(self) -> str | None:
        if self.target_ratio is not None:
            return f"{self.target_ratio:g}x"
        return None if self.target_value is None else f"{self.target_value:g} {self.unit}"

    @property
    def is_met(self) -> bool | None:
        """None: nothing was asked, or there was no peer to compare with."""
        if self.target_ratio is not None:
            return None if self.ratio is None else self.ratio >= self.target_ratio
        if self.target_value is None:
            return None
        ours = self.ours.median
        return ours <= self.target_value if self.less_is_better else ours >= self.target_value

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "ours": _rounded(self.ours.median),
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": None if self.peer_value is None else _rounded(self.peer_value.median),
            "ratio": None if self.ratio is None else _rounded(self.ratio),
            "target": self.target,
        }

    def cells(self) -> tuple[str, ...]:
        peer = self.peer_value
        ratio = "–" if self.ratio is None else f"{self.ratio:.2f}x"
        met = {True: "yes", False: "no", None: "–"}[self.is_met]
        ours = (figure(self.ours.median), self.ours.spread)
        theirs = ("–", "–") if peer is None else (figure(peer.median), peer.spread)
        return (self.what, *ours, self.unit, self.peer or "–", *theirs, ratio, self.target or "–", met)


@dataclass(slots=True)
class Report:
    benchmark: str
    machine: dict[str, Any]
    versions: dict[str, str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    """What a reader must know beside the figures: a peer that could not run, a reduced workload."""

    def json_line(self) -> str:
        head = {"benchmark": self.benchmark, "machine": self.machine, "versions": self.versions}
        return json.dumps(head | {"rows": [row.as_json() for row in self.rows]}, ensure_ascii=False)

    def table(self) -> str:
        """A Markdown table: what is printed is what `docs/benchmarks.md` keeps."""
        today = datetime.datetime.now(datetime.UTC).date()
        machine = ", ".join(f"{k} {v}" for k, v in self.machine.items())
        versions = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        notes = "".join(f"\n- {note}" for note in self.notes)
        body = markdown([COLUMNS, *(row.cells() for row in self.rows)])
        return f"{self.benchmark}, {today}; {machine}; {versions}\n\n{body}\n{notes}".rstrip()


class Progress:
    """Lines and a spinner on stderr; plain lines where rich is not installed."""

    def __init__(self) -> None:
        self._status: Any = None
        try:
            from rich.console import Console

            self._console: Any = Console(stderr=True, highlight=False, soft_wrap=True)
        except ImportError:
            self._console = None

    def doing(self, text: str) -> None:
        """What runs now; shown on a terminal only."""
        if self._console is not None and self._console.is_terminal:
            self._status = self._status or self._console.status(text)
            self._status.update(text)
            self._status.start()

    def say(self, text: str) -> None:
        if self._console is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._console.print(text, markup=False)

    def done(self) -> None:
        if self._status is not None:
            self._status.stop()


def argument_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The arguments all benchmarks have; add your own."""
    parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py", description=description)
    parser.add_argument("--quick", action="store_true", help="under a minute: less work, ours and in-process peers")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--peer-url", metavar="URL", help="a running server to compare with")
    parser.add_argument("--rounds", type=positive, metavar="N", help="timed rounds of every contender")
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def program_of(target: str) -> Callable[[str], Path]:
    """For argparse: a program of another environment, which `make TARGET` makes."""

    def found(text: str) -> Path:
        if (problem := missing_program(text, target)) is not None:
            raise argparse.ArgumentTypeError(problem)
        return Path(text)

    return found


def missing_program(program: str, target: str) -> str | None:
    """What to do about a program that is not there; None if it is."""
    return None if shutil.which(program) else f"there is no program {program}; to make it: make {target}"


def alternate(
    contenders: Mapping[str, Contender],
    rounds: int,
    *,
    warmups: int = 0,
    progress: Progress | None = None,
) -> dict[str, Measure]:
    """A B A B …: a disturbance of the machine meets everyone. Warm-up rounds are run the same way and dropped."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-warmups, rounds):
        for name, run in contenders.items():
            if progress:
                progress.doing(f"{'warm-up' if number < 0 else f'round {number + 1} of {rounds}'}: {name}")
            value = run()
            if number >= 0:
                values[name].append(value)
    return {name: Measure(tuple(v)) for name, v in values.items()}


def machine() -> dict[str, Any]:
    """What the figures depend on, with nothing that names the machine."""
    found: dict[str, Any] = {"os": platform.system(), "cpu": _cpu_name(), "cores": _cores()}
    if "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of the packages that are installed, and Python's."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = getattr(sys.modules.get(name), "__version__", None)  # run from a checkout
            if version:
                found[name] = str(version)
    return found


def report(result: Report, *, json_line: bool = False) -> None:
    print(result.table(), flush=True)
    if json_line:
        print(result.json_line(), flush=True)


def markdown(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in (padded[0], rule, *padded[1:]))


def figure(value: float) -> str:
    """Three digits that matter."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def some_of(what: str, known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """For argparse: names between commas, all of them known."""

    def split(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} '{name}'; known: {', '.join(known)}")
        return names

    return split
