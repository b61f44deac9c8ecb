"""Work of a soak test: training, samples, chats and episodes that go on while processes are killed, with every answer
checked.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]

import openai  # noqa: E402
import tinker  # noqa: E402
from tinker import types  # noqa: E402

from palestra.episodes import EpisodeClient, NewGroup, NoEpisode, Task  # noqa: E402
from palestra.episodes.client.errors import EpisodeApiError  # noqa: E402
from palestra.types.episodes import RunSettings  # noqa: E402

KEY = "tml-soak"
WAIT_S = 600.0  # for one result: longer than any pause that a kill makes
STEPS = 6
SAMPLES_AT_ONCE = 8
RTOL = 1e-3  # others' data in the same batch change the last digits; a step more or less changes a loss by a tenth
SOME_TOKENS = range(16, 300)


class Violation(Exception):
    """An answer is missing, doubled or wrong."""


@dataclass(slots=True)
class Work(ABC):
    """Something that is done again and again in a thread of its own."""

    url: str
    model: str
    name: str
    done: int = 0
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """When something was answered, and how many seconds it took."""
    failure: BaseException | None = None
    is_ending: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.open()
            while not self.is_ending.is_set():
                self.once()
            self.close()
        except BaseException as e:
            self.failure = e

    def open(self) -> None:
        return

    @abstractmethod
    def once(self) -> None: ...

    def close(self) -> None:
        return

    def timed(self, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        answer = call()
        self.latencies.append((time.monotonic(), time.perf_counter() - started))
        return answer

    def check(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise Violation(f"{self.name}: {what} is {found!r}, not {expected!r}")


@dataclass(frozen=True, slots=True)
class TrainedLife:
    losses: list[float]
    tokens: list[int]
    path: str


@dataclass(slots=True)
class Tenant(Work):
    """Trains the same adapter from its beginning, again and again: every life must be like the first."""

    number: int = 0
    first: TrainedLife | None = None
    kept: list[str] = field(default_factory=list)

    def once(self) -> None:
        with tinker.ServiceClient(base_url=self.url, api_key=KEY) as service:
            life = self.live(service)
        self.kept.append(life.path)
        rest = tinker.RestClient(base_url=self.url, api_key=KEY)
        while len(self.kept) > 2:
            rest.delete_checkpoint_from_tinker_path(self.kept.pop(0)).result(timeout=WAIT_S)
        self.first = self.first or life
        for step, (found, expected) in enumerate(zip(life.losses, self.first.losses, strict=True)):
            if abs(found - expected) > RTOL * abs(expected):
                raise Violation(
                    f"{self.name}: the loss of step {step} is {found}, not {expected}: a step was lost or doubled"
                )
        self.done += STEPS

    def live(self, service: tinker.ServiceClient, on_step: Callable[[int], None] | None = None) -> TrainedLife:
        model = service.create_lora_training_client(self.model, rank=4, seed=self.number)
        losses = []
        for step in range(STEPS):
            passed = model.forward_backward([self.datum()], "cross_entropy")
            stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
            if on_step is not None:
                on_step(step)
            losses.append(self.timed(lambda passed=passed: passed.result(timeout=WAIT_S)).metrics["loss:sum"])
            stepped.result(timeout=WAIT_S)
        sampler = model.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=8, temperature=0.0)
        answer = sampler.sample(types.ModelInput.from_ints([20, 21, 22]), 1, params).result(timeout=WAIT_S)
        path = model.save_state(f"life-{time.time_ns()}").result(timeout=WAIT_S).path
        return TrainedLife(losses, answer.sequences[0].tokens, path)

    def datum(self) -> types.Datum:
        tokens = random.Random(self.number).choices(SOME_TOKENS, k=33)
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * 32}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


@dataclass(slots=True)
class Samples(Work):
    """Seeded samples of the base model, several at a time: each must be like the first with its seed."""

    first: dict[int, list[int]] = field(default_factory=dict)
    _service: tinker.ServiceClient | None = None
    _sampler: tinker.SamplingClient | None = None

    def open(self) -> None:
        self._service = tinker.ServiceClient(base_url=self.url, api_key=KEY)
        self._sampler = self._service.create_sampling_client(base_model=self.model)

    def once(self) -> None:
        assert self._sampler is not None
        prompt, started = types.ModelInput.from_ints([30, 31, 32]), time.perf_counter()
        futures = [
            self._sampler.sample(prompt, 1, types.SamplingParams(max_tokens=16, seed=seed))
            for seed in range(SAMPLES_AT_ONCE)
        ]
        for seed, future in enumerate(futures):
            (sequence,) = future.result(timeout=WAIT_S).sequences
            self.check(f"the sample with seed {seed}", sequence.tokens, self.first.setdefault(seed, sequence.tokens))
            self.latencies.append((time.monotonic(), time.perf_counter() - started))
            self.done += 1

    def close(self) -> None:
        assert self._service is not None
        self._service.close("success").result(timeout=WAIT_S)


@dataclass(slots=True)
class Chats(Work):
    """Chats at the model endpoint. A call that a kill interrupts is made again."""

    first: str | None = None
    _client: openai.OpenAI | None = None

    def open(self) -> None:
        self._client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S)

    def once(self) -> None:
        assert self._client is not None
        messages: Any = [{"role": "user", "content": "How many crates are there?"}]
        try:
            answer = self.timed(
                lambda: (
                    self._client
                    and self._client.chat.completions.create(
                        model=self.model, messages=messages, max_tokens=12, temperature=0.0
                    )
                )
            )
        except (openai.APIConnectionError, openai.InternalServerError):
            time.sleep(0.2)
            return
        content = answer.choices[0].message.content or ""
        self.first = content if self.first is None else self.first
        self.check("the answer", content, self.first)
        self.done += 1

    def close(self) -> None:
        assert self._client is not None
        self._client.close()


@dataclass(slots=True)
class EpisodeTrainer(Work):
    """Registers a group of episodes, and reads it once it is played: each once, in order, with its own rewards."""

    _client: EpisodeClient | None = None
    cursor: int = 0

    def open(self) -> None:
        self._client = EpisodeClient(self.url, KEY, retry_s=WAIT_S)

    def once(self) -> None:
        assert self._client is not None
        # A lease that a kill has cut off is soon free again, however often that happens.
        run = self._client.run("soak", RunSettings(lease_s=5.0, max_attempts=1000), model=self.model)
        name = f"group-{self.done}"
        task = Task(
            id=name, environment="soak", prompt=[{"role": "user", "content": name}], extras={"number": self.done}
        )
        run.register([NewGroup(group_id=name, task=task, size=2)])
        group = self.timed(lambda: next(run.groups(self.cursor, wait_s=WAIT_S)))
        self.check("the group that was played", group.group_id, name)
        rewards = [one.info.result.reward if one.info.result else None for one in group.episodes]
        self.check(f"the rewards of {name}", rewards, [float(self.done)] * 2)
        self.cursor = group.number
        run.commit(group.number)
        self.done += 1

    def close(self) -> None:
        assert self._client is not None
        self._client.close()


@dataclass(slots=True)
class EpisodePlayer(Work):
    """Plays episodes with one model call each. Where a kill ends the attempt, another one is played."""

    _client: EpisodeClient | None = None

    def open(self) -> None:
        self._client = EpisodeClient(self.url, KEY, retry_s=WAIT_S)

    def once(self) -> None:
        assert self._client is not None
        try:
            with self._client.episode("soak", wait_s=2.0, on_error="release") as episode:
                with episode.openai() as model:
                    model.chat.completions.create(model=episode.model, messages=list(episode.task.prompt), max_tokens=4)  # pyright: ignore[reportArgumentType]
                episode.end(float(episode.task.extras["number"]))
                self.done += 1
        except (NoEpisode, EpisodeApiError, openai.APIError):
            return

    def close(self) -> None:
        assert self._client is not None
        self._client.close()


def all_work(url: str, model: str, tenants: int) -> list[Work]:
    return [
        *(Tenant(url, model, f"tenant {number}", number=number) for number in range(tenants)),
        Samples(url, model, "samples"),
        Chats(url, model, "chats"),
        EpisodeTrainer(url, model, "episodes"),
        EpisodePlayer(url, model, "player"),
    ]
