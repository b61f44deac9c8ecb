"""What every contender is asked to do, and the clock around it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Generate = Callable[[list[list[int]]], int]
"""Prompts in, number of wanted tokens out."""


def ragged(n: int, low: int, high: int, *, seed: int) -> tuple[int, ...]:
    """n lengths spread evenly over [low, high], in an order that tells nothing."""
    lengths = np.linspace(low, high, n).round().astype(int)
    return tuple(np.random.default_rng(seed).permutation(lengths).tolist())


@dataclass(frozen=True, slots=True)
class SampleWork:
    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]
    samples: int = 1
    """Sequences for each prompt."""
    repeats: int = 1
    """Times the whole is done, one after another, within one timing."""

    @classmethod
    def uniform(cls, n: int, tokens_in: int, tokens_out: int, **more: int) -> SampleWork:
        return cls((tokens_in,) * n, (tokens_out,) * n, **more)

    @classmethod
    def ragged(cls, n: int, tokens_in: tuple[int, int], tokens_out: tuple[int, int]) -> SampleWork:
        return cls(ragged(n, *tokens_in, seed=1), ragged(n, *tokens_out, seed=2))

    @property
    def tokens(self) -> int:
        return sum(self.output_lengths) * self.samples

    @property
    def longest(self) -> int:
        return max(i + o for i, o in zip(self.prompt_lengths, self.output_lengths, strict=True))

    def prompts(self, vocab_size: int, run: int) -> list[list[int]]:
        """Fresh tokens for every run: a cache of earlier prompts must not be what is measured."""
        rng = np.random.default_rng([3, run])
        return [rng.integers(0, vocab_size, n).tolist() for n in self.prompt_lengths]


@dataclass(frozen=True, slots=True)
class TrainWork:
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def data(self, vocab_size: int) -> list[NDArray[np.int64]]:
        """Each one token longer than its length: inputs are all but the last, targets all but the first."""
        rng = np.random.default_rng(4)
        return [rng.integers(0, vocab_size, n + 1) for n in self.lengths]


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def sampling_contender(
    work: SampleWork,
    vocab_size: int,
    generate: Generate,
    device: torch.device,
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[[], float]:
    """Tokens per second; refuses a run that made another number of tokens than was asked for.

    `running` is entered before the clock starts and left after it stops.
    """
    runs = itertools.count()

    def run() -> float:
        batches = [work.prompts(vocab_size, next(runs)) for _ in range(work.repeats)]
        made: list[int] = []
        with running():
            seconds = timed(lambda: made.extend(generate(prompts) for prompts in batches), device)
        if set(made) != {work.tokens}:
            raise RuntimeError(f"{made[0]} tokens came back, {work.tokens} were asked for")
        return sum(made) / seconds

    return run


def training_contender(step: Callable[[], object], amount: float, device: torch.device) -> Callable[[], float]:
    """`amount` (tokens, steps) per second."""
    return lambda: amount / timed(step, device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
