"""Decoding alone: how fast a full batch takes steps when every prompt is computed, and what the hardware would
allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from peers.ours import Ours
from peers.workloads import timed

from palestra.model import Adapter, ModelSpec, Sampler
from palestra.model.loading.parameter_counts import count_parameters
from palestra.types import SampleRequest, SamplingParams

WARM_STEPS = 4
PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class DecodeWork:
    rows: int
    prompt: int = 128
    steps: int = 128

    @property
    def context(self) -> float:
        """Tokens a row sees, on average over the rows and the timed steps: the first rows decode while the last
        prompts are computed."""
        return self.prompt + self.prefill_steps / 2 + WARM_STEPS + self.steps / 2

    @property
    def prefill_steps(self) -> int:
        return -(-self.rows * self.prompt // PREFILL_TOKENS)


def decode_contender(ours: Ours, work: DecodeWork, adapters: list[Adapter]) -> Callable[[], float]:
    """Tokens per second of steps in which all rows decode; rows take the adapters in turn, in runs."""
    new = work.prefill_steps + work.steps + WARM_STEPS + 8
    sampler = Sampler(
        ours.model.decoder,
        ours.pool,
        cache_tokens=work.rows * (work.prompt + new + 32),
        max_rows=work.rows,
        prefill_tokens=PREFILL_TOKENS,
    )
    if sampler.state_slots is not None and sampler.state_slots.n_slots < work.rows:
        raise RuntimeError(f"memory is left for the states of {sampler.state_slots.n_slots} of {work.rows} rows")
    runs = itertools.count()

    def steps() -> None:
        made = sum(len(sampler.step().tokens) for _ in range(work.steps))
        if made != work.steps * work.rows:
            raise RuntimeError(f"{made} tokens came back, {work.steps * work.rows} were asked for")

    def run() -> float:
        rng = np.random.default_rng([5, next(runs)])
        numbers = []
        for i in range(work.rows):
            prompt = tuple(rng.integers(0, ours.vocab_size, work.prompt).tolist())
            params = SamplingParams(max_tokens=new, stop_token_ids=(), seed=i)
            adapter = adapters[i * len(adapters) // work.rows] if adapters else None
            numbers.append(sampler.submit(SampleRequest(prompt=prompt, params=params), adapter))
        started = 0
        while started < work.rows:
            started += sum(event.is_first for event in sampler.step().tokens)
        for _ in range(WARM_STEPS):
            sampler.step()
        seconds = timed(steps, ours.device)
        for number in numbers:
            sampler.abort(number)
        while sampler.has_work:
            sampler.step()
        return work.steps * work.rows / seconds

    return run


def prefill_contender(ours: Ours, length: int, adapter: Adapter) -> Callable[[], float]:
    """Tokens of a prompt per second, until its first token is sampled."""
    sampler = Sampler(ours.model.decoder, ours.pool, cache_tokens=2 * length, max_rows=4, prefill_tokens=PREFILL_TOKENS)
    runs = itertools.count()

    def run() -> float:
        prompt = tuple(np.random.default_rng([6, next(runs)]).integers(0, ours.vocab_size, length).tolist())
        request = SampleRequest(prompt=prompt, params=SamplingParams(max_tokens=1, stop_token_ids=()))
        return length / timed(lambda: sampler.generate([request], [adapter]), ours.device)

    return run


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on this card."""

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measured(cls, device: torch.device) -> Ceilings:
        def fastest(run: Callable[[], object]) -> float:
            return min(timed(run, device) for _ in range(6))

        a, b = (torch.randn(1 << 30, device=device) for _ in range(2))
        x, y = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
        return cls(2 * (4 << 30) / fastest(lambda: b.copy_(a)), 2 * 8192**3 / fastest(lambda: x @ y))

    def tokens_per_s(self, spec: ModelSpec, work: DecodeWork, itemsize: int = 2) -> float:
        """The fastest a step can be that moves once what it needs of weights, keys, values and states, or is bound by
        its products. Rows choose their experts at random."""
        kv_bytes = spec.kv_numbers_per_token * itemsize * work.rows * work.context
        for recurrence in spec.recurrences.values():  # states are float32, read and written
            kv_bytes += 2 * 4 * math.prod(recurrence.state_shape) * work.rows
        whole, read, used = count_parameters(spec), 0.0, 0.0
        for experts in spec.experts.values():
            numbers = experts.n_experts * experts.n_products * experts.size * (experts.latent_size or spec.hidden_size)
            share = experts.per_token / experts.n_experts
            read -= numbers * (1 - share) ** work.rows
            used -= numbers * (1 - share)
        reading = ((whole + read) * itemsize + kv_bytes) / self.bytes_per_s
        products = 2 * (whole + used) * work.rows / self.flops_per_s + kv_bytes / self.bytes_per_s
        return work.rows / max(reading, products)
