"""A policy and an environment that do what a script says, for tests of those who bring the two together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec import Struct

from palestra.chat import ChatTokenizer
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments import BaseTextEnv, EnvironmentSet
from palestra.rollouts.local.player import PlayerContext
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.testing.random_tokenizer import write_tokenizer
from palestra.types import SampledSequence, SamplingParams, StopReason
from palestra.types.rollouts import GroupRequest, Task
from palestra.types.sampling import sample_seed

NAME = "tests.training.scripted:ScriptedEnv"
PROMPT = [{"role": "user", "content": "Begin."}]


@cache
def chat_tokenizer() -> ChatTokenizer:
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab_size=512, max_positions=4096)
        return ChatTokenizer.load(Path(folder))


class Asked(Struct):
    prompt: list[int]
    params: SamplingParams


Says = Callable[[Asked], str | SampledSequence]


class ScriptedSampler:
    """Says what `says` makes of the prompt and the seed. Ends its turns, unless the limit cuts them."""

    model = "session-4"

    def __init__(self, says: Says | str, version: int = 0) -> None:
        self._says = says if callable(says) else lambda _: says
        self.version = version
        self.asked: list[Asked] = []
        self.counts: list[int] = []
        """Number of sequences of each request."""
        self.at_once = 0
        self.most_at_once = 0

    async def sample(
        self, prompt: Sequence[int], params: SamplingParams, count: int = 1, pictures: Any = ()
    ) -> list[SampledSequence]:
        asked = [Asked(list(prompt), with_seed_of(params, index)) for index in range(count)]
        self.asked += asked
        self.counts.append(count)
        self.at_once += count
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            return [self._sequence(one) for one in asked]
        finally:
            self.at_once -= count

    async def base_model(self) -> str:
        return "ephebe"

    async def score(self, tokens: Sequence[int], pictures: Any = ()) -> list[float]:
        return [0.0] * len(tokens)

    def _sequence(self, asked: Asked) -> SampledSequence:
        said = self._says(asked)
        if isinstance(said, SampledSequence):
            return said
        tokenizer = chat_tokenizer()
        tokens = [*tokenizer.encode_text(said), tokenizer.turn_end]
        limit = asked.params.max_tokens or len(tokens)
        is_cut = len(tokens) > limit
        stop = StopReason.LENGTH if is_cut else StopReason.STOP
        tokens = tokens[:limit]
        return SampledSequence(tokens=tokens, logprobs=[-0.25 * (t % 7) for t in tokens], stop_reason=stop)


def with_seed_of(params: SamplingParams, index: int) -> SamplingParams:
    return params if params.seed is None else msgspec.structs.replace(params, seed=sample_seed(params.seed, index))


class HangingSampler(ScriptedSampler):
    async def sample(
        self, prompt: Sequence[int], params: SamplingParams, count: int = 1, pictures: Any = ()
    ) -> list[SampledSequence]:
        self.at_once += 1
        await asyncio.Event().wait()
        raise AssertionError


class ScriptedEnv(BaseTextEnv):
    """Made of its extras. `steps`: for each turn what step answers, {"raise": text}, {"hang": True} or {"sleep_s": …};
    reward 0 and one user message where it does not say. `init` likewise, and `places`: how many may be there at once.
    `grade`: what it is worth as it stands. `close_s`: how long closing takes."""

    max_turns = 100
    alive: set[ScriptedEnv] = set()  # noqa: RUF012
    log: list[str] = []  # noqa: RUF012
    """Of all: "init", "step", "closing", "close"."""

    async def init_async(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        plan = self.extras.get("init") or {}
        await until(lambda: len(self.alive) < plan.get("places", 1000))
        self.alive.add(self)
        self.task = asyncio.current_task()
        await self._play("init", plan)
        return plan.get("messages", prompt), {}

    async def step_async(self, action: str) -> dict[str, Any]:
        steps = self.extras.get("steps") or [{}]
        plan = steps[min(self.turns, len(steps) - 1)]
        self.turns += 1
        await self._play("step", plan)
        default = {"observations": [{"role": "user", "content": f"{self.turns}?"}], "reward": 0.0, "done": False}
        return {**default, "metadata": {}, **plan}

    async def close_async(self) -> None:
        self.log.append("closing")
        await asyncio.sleep(self.extras.get("close_s", 0))  # as one that has to say goodbye to somebody
        self.log.append("close")
        assert asyncio.current_task() is self.task, "closed in another task than it was opened in"
        self.alive.remove(self)

    def grade(self) -> float:
        return self.extras.get("grade", 0.0)

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns}

    async def _play(self, name: str, plan: dict[str, Any]) -> None:
        self.log.append(name)
        if text := plan.get("raise"):
            raise RuntimeError(text)
        if plan.get("hang"):
            await asyncio.Event().wait()
        await asyncio.sleep(plan.get("sleep_s", 0))
        for _ in range(plan.get("slow", 0)):
            await asyncio.sleep(0)


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 - what is waited for knows nothing of tests
        await asyncio.sleep(0)


@contextlib.contextmanager
def a_table(**settings: Any) -> Iterator[PlayerContext]:
    """Afterwards every environment has been closed."""
    ScriptedEnv.alive.clear()
    ScriptedEnv.log.clear()
    given = {"max_tokens": 64, "max_context": 4000, "timeout_s": 20.0} | settings
    entries = [EnvironmentEntry(name=NAME)]
    with EnvironmentSet(entries, env_threads=2, env_timeout_s=10) as environments:
        yield PlayerContext(chat_tokenizer(), environments, RolloutSettings(**given))
    assert not ScriptedEnv.alive


def a_request(name: str = "g", count: int = 1, **extras: Any) -> GroupRequest:
    task = Task(id=f"task-{name}", environment=NAME, prompt=PROMPT, extras=extras)
    return GroupRequest(id=name, task=task, step=3, seeds=tuple(sample_seed(100, index) for index in range(count)))
