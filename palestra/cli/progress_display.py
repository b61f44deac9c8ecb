"""Shows a run while it goes: a live display in a terminal, a line for each step elsewhere, and in both
the stage that the run is in, how far it is and since when.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import rich_click as click
from msgspec import Struct, field, to_builtins
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from palestra.config.train import RunConfig
from palestra.runs.advisories import Advisory
from palestra.runs.listener import RunListener, Silence, Stage

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40
QUIET_S = 8.0
"""Seconds without output after which a line says how far a stage is: 10 are promised, and the machine may be busy."""
BARS = (Stage.COLLECT, Stage.SCORE, Stage.UPDATE, Stage.EVAL)
"""Stages that always have a row on the board; others have one while they last."""
SHOWN = {
    "reward/mean": "reward",
    "eval/success": "eval",
    "loss/mean": "loss",
    "eval/loss": "eval",
    "dpo/accuracy": "accuracy",
    "kl/teacher": "teacher KL",
    "rollouts/zero_variance_share": "zero-variance",
    "policy/entropy_estimate": "entropy",
    "kl/sampler_trainer_k3": "mismatch",
    "optim/grad_norm": "grad",
    "throughput/total_tokens_per_s": "tokens/s",
    "time/total_s": "s",
}


@contextmanager
def open_display(kind: str, name: str, config: RunConfig, quiet_s: float = QUIET_S) -> Iterator[RunListener]:
    if kind == "auto":
        kind = "board" if sys.stdout.isatty() else "lines"
    if kind == "board":
        console = Console()
        board = LiveDisplay(name, config, console)
        with Live(board, console=console, refresh_per_second=4):
            yield board
    elif kind in ("json", "none"):
        yield JsonLines() if kind == "json" else Silence()
    else:
        with StepLines(config.steps, quiet_s) as lines:
            yield lines


class StageProgress(Struct):
    """The stage that a run is in, how far it is and since when."""

    stage: Stage
    done: int = 0
    total: int = 0
    """0 if the stage counts nothing."""
    begin: float = field(default_factory=time.time)

    def next(self, stage: Stage, done: int, total: int) -> StageProgress:
        return StageProgress(stage, done, total, self.begin if stage is self.stage else time.time())

    @property
    def text(self) -> str:
        count = f"{self.done} of {self.total}, " if self.total else ""
        begin = time.strftime("%H:%M:%S", time.localtime(self.begin))
        return f"{count}since {begin} ({clock(max(0.0, time.time() - self.begin))})"


class StepLines(Silence):
    """One line for each step, for the first beginning of each stage, and after every `quiet_s` seconds without one. Use
    as `with`: a thread watches the clock, since a stage may report nothing for minutes."""

    def __init__(self, steps: int, quiet_s: float = QUIET_S) -> None:
        self._steps, self._quiet_s = steps, quiet_s
        self._begun: set[Stage] = set()
        self._progress = StageProgress(Stage.START)
        self._said_at = time.monotonic()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._say_where_it_is, name="progress", daemon=True)

    def __enter__(self) -> StepLines:
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._watch.join()

    def _say_where_it_is(self) -> None:
        with suppress(OSError):  # the reader is gone: the run's own next line says so
            while not self._closed.wait(self._said_at + self._quiet_s - time.monotonic()):
                if time.monotonic() - self._said_at >= self._quiet_s:
                    self.note(f"{self._progress.stage}: {self._progress.text}")

    def stage(self, stage: Stage, done: int, total: int) -> None:
        self._progress = self._progress.next(stage, done, total)
        if done == 0 and total > 0 and stage not in self._begun:
            self._begun.add(stage)
            self.note(f"{stage}: 0 of {total}")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.note(f"step {step}/{self._steps}  {figures(metrics)}")

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        self.note(f"eval after step {step}  {figures(metrics)}")

    def note(self, text: str) -> None:
        self._said_at = time.monotonic()
        click.echo(text)


class JsonLines(Silence):
    def step(self, step: int, metrics: dict[str, float]) -> None:
        click.echo(json.dumps({"step": step, **metrics}))

    evaluated = step

    def note(self, text: str) -> None:
        click.echo(text, err=True)

    def advise(self, advisory: Advisory) -> None:
        click.echo(json.dumps({"step": advisory.step, "advisory": to_builtins(advisory)}))


class LiveDisplay:
    """A display that is redrawn a few times a second from the events of the run; advisories stay above it."""

    def __init__(self, name: str, config: RunConfig, console: Console) -> None:
        self._name, self._config, self._console = name, config, console
        self._begin = time.monotonic()
        self._stages: dict[Stage, tuple[int, int]] = {}
        self._progress = StageProgress(Stage.START)
        self._rewards: deque[tuple[float, float, float]] = deque(maxlen=SPARK_WIDTH)
        self._evals: list[tuple[int, float]] = []
        self._metrics: dict[str, float] = {}
        self._step, self._first = 0, None
        self._note = ""

    def stage(self, stage: Stage, done: int, total: int) -> None:
        self._stages[stage] = (done, total)
        self._progress = self._progress.next(stage, done, total)
        self._note = ""

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if self._first is None:
            self._first = step - 1, time.monotonic() - metrics.get("time/total_s", 0.0)
        self._step, self._metrics = step, metrics
        self._stages = {stage: (0, total) for stage, (_, total) in self._stages.items()}
        if (mean := metrics.get("reward/mean", metrics.get("loss/mean"))) is not None:
            self._rewards.append((metrics.get("reward/p10", mean), mean, metrics.get("reward/p90", mean)))

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        if (success := metrics.get("eval/success", metrics.get("eval/loss"))) is not None:
            self._evals.append((step, success))

    def note(self, text: str) -> None:
        self._note = text

    def advise(self, advisory: Advisory) -> None:
        self._console.print(Text(advisory.warning, "yellow"))

    def __rich__(self) -> RenderableType:
        return Group(
            self._header(), self._phases(), *self._curves(), Text(figures(self._metrics), "dim"), self._last_line()
        )

    def _header(self) -> Text:
        spent = time.monotonic() - self._begin
        parts = [f"step {self._step} of {self._config.steps}", f"{clock(spent)} gone"]
        if (left := self._seconds_left()) is not None:
            parts.append(f"about {clock(left)} left")
        return Text.from_markup(
            f"[bold]{escape(self._name)}[/bold]  {escape(self._config.model.name)}  {' · '.join(parts)}"
        )

    def _seconds_left(self) -> float | None:
        if self._first is None:
            return None
        first, begin = self._first
        return (time.monotonic() - begin) / (self._step - first) * (self._config.steps - self._step)

    def _phases(self) -> Table:
        table, now = Table.grid(padding=(0, 1)), self._progress
        for stage in BARS if now.stage in BARS else (*BARS, now.stage):
            done, total = self._stages.get(stage, (0, 0))
            seconds = self._metrics.get(f"time/{stage}_s")
            parts = [now.text] if stage is now.stage else []
            parts += [f"{seconds:.1f} s last time"] if seconds else []
            table.add_row(
                Text(f"{stage:>8}"),
                ProgressBar(total=max(total, 1), completed=done, width=SPARK_WIDTH),
                Text(" · ".join(parts), "dim"),
            )
        return table

    def _curves(self) -> Iterator[Text]:
        if self._rewards:
            low, mean, high = zip(*self._rewards, strict=True)
            label = "reward" if "reward/mean" in self._metrics else "loss"
            yield (
                Text(f"{label:>8} ")
                + Text(sparkline(mean), "green")
                + Text(f" {mean[-1]:.3f}  (p10 {low[-1]:.2f}, p90 {high[-1]:.2f})")
            )
        if self._evals:
            yield Text("    eval ") + Text("  ".join(f"{value:.3f} @{step}" for step, value in self._evals), "cyan")

    def _last_line(self) -> Text:
        return Text(self._note, "yellow")


def figures(metrics: dict[str, float]) -> str:
    return "  ".join(f"{label} {number(metrics[name])}" for name, label in SHOWN.items() if name in metrics)


def number(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1e}"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def sparkline(values: tuple[float, ...]) -> str:
    """A curve of values between 0 and 1; others are stretched to fit."""
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in values)
