"""Finds where a run and its replay first differ: in tokens, rewards, log-probabilities, gradients, weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from palestra.runs.control import request_stop
from palestra.runs.listener import RunListener
from palestra.runs.reader import Part, RunReader
from palestra.runs.record_files import RunError
from palestra.runs.saved_checkpoints import list_checkpoints

TRAINED = ("loss/sum", "optim/grad_norm", "optim/lr", "guard/undone", "optim/kept")
FILES = ("adapter_model.safetensors", "optimizer.safetensors")
Part_ = tuple[int, str, Any]
"""A step, what it is of, and its value."""


class ReplayDifference(Struct, frozen=True):
    """The first value that is not the same."""

    step: int
    where: str
    original: Any
    replay: Any


class ReplayComparison(Struct, frozen=True):
    what: str
    compared: int
    """Number of values."""
    first: ReplayDifference | None


class StopAfter:
    """Passes the reports of a run on, and asks it to stop after a step."""

    def __init__(self, inner: RunListener, run: RunReader, last: int) -> None:
        self.stage, self.evaluated, self.note, self.advise = inner.stage, inner.evaluated, inner.note, inner.advise
        self._inner, self._run, self._last = inner, run, last

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._inner.step(step, metrics)
        if step >= self._last:
            request_stop(self._run)


def parse_steps(text: str) -> tuple[int, int]:
    """`30..40`, or one step. Raises RunError."""
    first, dots, last = text.partition("..")
    last = last if dots else first
    if not first.isdecimal() or not last.isdecimal() or not 0 < int(first) <= int(last):
        raise RunError(f"{text!r} names no steps; give the first and the last, as in 30..40")
    return int(first), int(last)


def compare_replay(original: RunReader, replay: RunReader, first: int, last: int) -> list[ReplayComparison]:
    steps = [step for step in range(first, last + 1) if step in replay.steps()]
    if missing := [step for step in steps if step not in original.steps()]:
        raise RunError(f"{original.name} has no rollouts of step {missing[0]} to compare with")
    kinds = {
        "sampled tokens": _tokens,
        "rewards": _rewards,
        "losses and gradients": _updates,
        "log-probabilities of the sampler": _logprobs,
        "weights and optimizer": _weights,
    }
    return [_compare(what, *(list(read(run, steps)) for run in (original, replay))) for what, read in kinds.items()]


def _compare(what: str, original: Sequence[Part_], replay: Sequence[Part_]) -> ReplayComparison:
    theirs = {(step, where): value for step, where, value in replay}
    known = [(step, where, value) for step, where, value in original if (step, where) in theirs]
    extra = theirs.keys() - {(step, where) for step, where, _ in original}
    if what != "weights and optimizer":  # which steps have a checkpoint is no difference
        known += [(step, where, None) for step, where in sorted(extra)]
        known += [(step, where, value) for step, where, value in original if (step, where) not in theirs]
    for step, where, value in sorted(known, key=lambda part: part[:2]):
        if (other := theirs.get((step, where))) != value:
            shown = (_shown(value), _shown(other))
            return ReplayComparison(what, len(known), ReplayDifference(step, where, *shown))
    return ReplayComparison(what, len(known), None)


def _shown(value: Any) -> Any:
    return f"{len(value)} bytes" if isinstance(value, bytes) else value


def _rewards(run: RunReader, steps: Sequence[int]) -> Iterator[Part_]:
    for step in steps:
        for row in run.read_rollouts(step):
            yield step, row["id"], row["reward"]


def _tokens(run: RunReader, steps: Sequence[int]) -> Iterator[Part_]:
    """Returns the tokens; of runs that keep none, the texts of the messages."""
    for step in steps:
        if run.step_file(Part.TOKENS, step).is_file():
            for row in run.read_tokens(step):
                yield step, row["id"], [row["prompt"], *(turn["tokens"] for turn in row["turns"])]
        else:
            for row in run.read_rollouts(step):
                yield step, row["id"], [str(message.get("content")) for message in row["messages"]]


def _logprobs(run: RunReader, steps: Sequence[int]) -> Iterator[Part_]:
    for step in steps:
        if run.step_file(Part.TOKENS, step).is_file():
            for row in run.read_tokens(step):
                yield step, row["id"], [turn["logprobs"] for turn in row["turns"]]


def _updates(run: RunReader, steps: Sequence[int]) -> Iterator[Part_]:
    for row in run.read_metrics():
        if row["step"] in steps:
            yield from ((row["step"], name, row[name]) for name in TRAINED if name in row)


def _weights(run: RunReader, steps: Sequence[int]) -> Iterator[Part_]:
    for saved in list_checkpoints(run):
        if saved.step in steps and saved.folder is not None:
            for name in FILES:
                yield saved.step, name, (saved.folder / name).read_bytes()
