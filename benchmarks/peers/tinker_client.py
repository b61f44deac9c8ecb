"""Work for a Tinker server through the official SDK, with the clock around it.

It imports nothing of ours, so that a venv with an older SDK can run it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
# The SDK takes torch in if it can, for nothing that happens here; its pages would be shared with the worker's, and
# the worker's PSS would count half of them.
sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]

import tinker  # noqa: E402
from tinker import types  # noqa: E402

KEY = "tml-benchmark"
WAIT_S = 900.0  # for one result: a server that hangs ends a row, not the run
ADAM = types.AdamParams(learning_rate=1e-4)
SOME_TOKENS = range(16, 4000)  # in every shape's vocabulary, and no special ones
PER_SESSION = 2000  # samples of one sampling session that the SDK has in flight at most


@dataclass(slots=True)
class Clock:
    seconds: float = 0.0


@contextlib.contextmanager
def timed() -> Iterator[Clock]:
    clock, start = Clock(), time.perf_counter()
    yield clock
    clock.seconds = time.perf_counter() - start


class WrongAnswer(Exception):
    """The server answered, but with something else than was asked for."""


@dataclass(slots=True)
class TinkerClient:
    """A session at one server: trainers are made as they are needed, samplers are snapshots of the first."""

    url: str
    rank: int
    service: tinker.ServiceClient = field(init=False)
    base_model: str = field(init=False)
    _trainers: list[tinker.TrainingClient] = field(default_factory=list)
    _sampler: tinker.SamplingClient | None = None
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.service = tinker.ServiceClient(base_url=self.url, api_key=KEY)
        names = [model.model_name for model in self.service.get_server_capabilities().supported_models]
        self.base_model = next(name for name in names if name)

    def close(self) -> None:
        """A server that does not answer any more must not keep us from stopping it."""
        with contextlib.suppress(Exception):  # older SDKs have no such call
            self.service.close("success").result(timeout=30)

    def trainers(self, n: int) -> list[tinker.TrainingClient]:
        while len(self._trainers) < n:
            self._trainers.append(self.service.create_lora_training_client(self.base_model, rank=self.rank))
        return self._trainers[:n]

    @property
    def trainer(self) -> tinker.TrainingClient:
        return self.trainers(1)[0]

    @property
    def sampler(self) -> tinker.SamplingClient:
        if self._sampler is None:
            self.train_step(1, 64)
            self._sampler = self.trainer.save_weights_and_get_sampling_client()
        return self._sampler

    def tokens(self, length: int) -> list[int]:
        return self._random.choices(SOME_TOKENS, k=length)

    def prompt(self, length: int) -> types.ModelInput:
        """A fresh one each time: no cache of earlier prompts is measured."""
        return types.ModelInput.from_ints(self.tokens(length))

    def batch(self, n: int, length: int) -> list[types.Datum]:
        return [self._datum(self.tokens(length + 1)) for _ in range(n)]

    def _datum(self, tokens: list[int]) -> types.Datum:
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    # Training

    def forward_backward(self, n: int, length: int) -> float:
        trainer, data = self.trainer, self.batch(n, length)
        with timed() as clock:
            output = trainer.forward_backward(data, "cross_entropy").result(timeout=WAIT_S)
        if len(output.loss_fn_outputs) != n:
            raise WrongAnswer(f"{len(output.loss_fn_outputs)} outputs for {n} data")
        return clock.seconds

    def optim_step(self) -> float:
        with timed() as clock:
            self.trainer.optim_step(ADAM).result(timeout=WAIT_S)
        return clock.seconds

    def train_step(self, n: int, length: int) -> float:
        return self.train(1, n, length, steps=1)

    def train(self, tenants: int, n: int, length: int, *, steps: int) -> float:
        """Seconds for `steps` of every tenant, each at its own pace; the optimizer's step is sent behind the pass."""
        work = [(trainer, self.batch(n, length)) for trainer in self.trainers(tenants)]

        async def one(trainer: tinker.TrainingClient, data: list[types.Datum]) -> None:
            for _ in range(steps):
                await self._step(trainer, data)

        async def everyone() -> float:
            with timed() as clock:
                await asyncio.gather(*(one(trainer, data) for trainer, data in work))
            return clock.seconds

        return asyncio.run(everyone())

    async def _step(self, trainer: tinker.TrainingClient, data: list[types.Datum]) -> int:
        forward_backward = await trainer.forward_backward_async(data, "cross_entropy")
        step = await trainer.optim_step_async(ADAM)
        async with asyncio.timeout(WAIT_S):
            await forward_backward
            await step
        return 1

    # Sampling

    def save(self) -> float:
        """Of weights that were never saved before."""
        self.train_step(1, 64)
        with timed() as clock:
            self._sampler = created(self.trainer.save_weights_and_get_sampling_client())
        return clock.seconds

    def sample(self, prompts: int, length: int, max_tokens: int, *, samples: int = 1) -> float:
        """Seconds for all of them, sent at once."""
        return self._sample([self.sampler], prompts, length, max_tokens, samples)

    def sample_crowd(self, requests: int, length: int, max_tokens: int) -> float:
        """The same with as many sampling sessions as it takes to have all of them in flight."""
        sessions = -(-requests // PER_SESSION)
        samplers = [created(self.service.create_sampling_client(base_model=self.base_model)) for _ in range(sessions)]
        return self._sample(samplers, requests, length, max_tokens, 1)

    def _sample(
        self, samplers: list[tinker.SamplingClient], prompts: int, length: int, max_tokens: int, samples: int
    ) -> float:
        params, inputs = sampling_params(max_tokens), [self.prompt(length) for _ in range(prompts)]
        with timed() as clock:
            futures = [samplers[i % len(samplers)].sample(prompt, samples, params) for i, prompt in enumerate(inputs)]
            answers = [future.result(timeout=WAIT_S) for future in futures]
        for answer in answers:
            check_lengths(answer, samples, max_tokens)
        return clock.seconds

    def compute_logprobs(self, length: int) -> float:
        sampler, prompt = self.sampler, self.prompt(length)
        with timed() as clock:
            logprobs = sampler.compute_logprobs(prompt).result(timeout=WAIT_S)
        if len(logprobs) != length:
            raise WrongAnswer(f"{len(logprobs)} logprobs for {length} tokens")
        return clock.seconds

    # Both at once

    def rates(
        self, seconds: float, *, train: tuple[int, int] | None = None, samples_in_flight: int = 0
    ) -> tuple[float, float]:
        """Steps/s and tok/s while both go on: what ended in a window that opens when all is under way."""
        sampler, data = self.sampler, self.batch(*train) if train else []
        steps, tokens = Ends(), Ends()

        async def measure() -> tuple[float, float]:
            # Two steps in flight: alone, the server must not have to wait for its client.
            loops = [steps.count(lambda: self._step(self.trainer, data)) for _ in range(2)] if train else []
            # Of many lengths, or they would all end together, in few and large bursts.
            loops += [
                tokens.count(lambda: self._one_sample(sampler, self._random.randint(32, 96)))
                for _ in range(samples_in_flight)
            ]
            tasks = [asyncio.create_task(loop) for loop in loops]
            opens = time.perf_counter() + 1.5
            await asyncio.sleep(seconds + 1.5)
            steps.stop = tokens.stop = True
            await asyncio.gather(*tasks)
            return steps.rate(opens, opens + seconds), tokens.rate(opens, opens + seconds)

        return asyncio.run(measure())

    def latencies(self, n: int, *, train: tuple[int, int] | None = None) -> list[float]:
        """Of `n` samples of 64 tokens, one after another, while steps of `train` follow each other."""
        sampler, steps = self.sampler, Ends()
        data = self.batch(*train) if train else []

        async def measure() -> list[float]:
            training = asyncio.create_task(steps.count(lambda: self._step(self.trainer, data))) if train else None
            if train:
                await asyncio.sleep(0.3)
            seconds = []
            for _ in range(n):
                with timed() as clock:
                    await self._one_sample(sampler, 64)
                seconds.append(clock.seconds)
            steps.stop = True
            if training:
                await training
            return seconds

        return asyncio.run(measure())

    async def _one_sample(self, sampler: tinker.SamplingClient, max_tokens: int) -> int:
        async with asyncio.timeout(WAIT_S):
            answer = await sampler.sample_async(self.prompt(64), 1, sampling_params(max_tokens))
        check_lengths(answer, 1, max_tokens)
        return max_tokens


@dataclass(slots=True)
class Ends:
    """When work of one kind ended, and how much of it."""

    at: list[tuple[float, int]] = field(default_factory=list)
    stop: bool = False

    async def count(self, work: Callable[[], Awaitable[int]]) -> None:
        while not self.stop:
            amount = await work()
            self.at.append((time.perf_counter(), amount))

    def rate(self, start: float, end: float) -> float:
        return sum(amount for at, amount in self.at if start <= at < end) / (end - start)


def created(client: Any) -> Any:
    """From 0.38 on the SDK returns a future of a client."""
    return client.result() if hasattr(client, "result") else client


def sampling_params(max_tokens: int) -> types.SamplingParams:
    """The plain distribution; an empty `stop` means that nothing ends a sample early."""
    return types.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=[])


def check_lengths(answer: types.SampleResponse, samples: int, max_tokens: int) -> None:
    lengths = [len(sequence.tokens) for sequence in answer.sequences]
    if lengths != [max_tokens] * samples:
        raise WrongAnswer(f"samples of {lengths} tokens, not {samples} of {max_tokens}")
