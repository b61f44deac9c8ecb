"""What a person sees of a run while it goes: a live display in a terminal, a line for each step elsewhere.

Owns: rows, bars, sparklines. Never touches: the run.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import rich_click as click
from msgspec import to_builtins
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from palestra.config.train import RunConfig
from palestra.runs.advisories import Advisory
from palestra.training.listener import RunListener, Silence, Stage

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40
QUIET_S = 5.0
"""Seconds without output after which a line says how far a stage is."""
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
def open_display(kind: str, name: str, config: RunConfig) -> Iterator[RunListener]:
    if kind == "auto":
        kind = "board" if sys.stdout.isatty() else "lines"
    if kind == "board":
        console = Console()
        board = LiveDisplay(name, config, console)
        with Live(board, console=console, refresh_per_second=4):
            yield board
    else:
        yield {"lines": StepLines(config.steps), "json": JsonLines(), "none": Silence()}[kind]


class StepLines(Silence):
    """One line for each step, for the first beginning of each stage, and from time to time where a stage takes long."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._begun: set[Stage] = set()
        self._said_at = time.monotonic()

    def stage(self, stage: Stage, done: int, total: int) -> None:
        is_first = done == 0 and stage not in self._begun
        if done < total and (is_first or time.monotonic() - self._said_at >= QUIET_S):
            self._begun.add(stage)
            self.note(f"{stage}: {done} of {total}")

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
        self._rewards: deque[tuple[float, float, float]] = deque(maxlen=SPARK_WIDTH)
        self._evals: list[tuple[int, float]] = []
        self._metrics: dict[str, float] = {}
        self._step, self._first = 0, None
        self._note = ""

    def stage(self, stage: Stage, done: int, total: int) -> None:
        self._stages[stage] = (done, total)
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
        table = Table.grid(padding=(0, 1))
        for stage in (Stage.COLLECT, Stage.UPDATE, Stage.EVAL):
            done, total = self._stages.get(stage, (0, 0))
            seconds = self._metrics.get(f"time/{stage}_s")
            table.add_row(
                Text(f"{stage:>8}"),
                ProgressBar(total=max(total, 1), completed=done, width=SPARK_WIDTH),
                Text(f"{seconds:.1f} s last time" if seconds else "", "dim"),
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
