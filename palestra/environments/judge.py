"""One judge: asks its model, keeps the answers, and stays within its bounds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import httpx
from msgspec import Struct

from palestra.config.judges import Fallback, JudgeConfig
from palestra.environments.errors import JudgeError
from palestra.environments.judge_prompts import AGAIN, rank_request, read_ranking, read_score, score_request
from palestra.net.chat_apis import NotAnAnswer, chat_api
from palestra.net.json_calls import CallFailure, post_json
from palestra.runs.record_files import LineFile, read_lines
from palestra.types.rollouts import Message, Rollout, Task

T = TypeVar("T")
CALL_S, CONNECT_S = 600.0, 10.0


class Judgement(Struct, kw_only=True):
    """What a judge said about a rollout; it stands in the rollout's record."""

    judge: str
    score: float | None = None
    """Between 0 and 1; None if there is no verdict."""
    answer: str = ""
    """The judge's words."""
    error: str = ""
    is_cached: bool = False


class JudgeCounts(Struct):
    calls: int = 0
    tokens: int = 0
    cached: int = 0
    failed: int = 0
    """Rollouts without a verdict."""


class BoundReached(Exception):
    """The run has made as many calls, or used as many tokens, as its config allows."""


class NoVerdict(Exception):
    """The judge could not be asked, or said nothing that can be used."""


class JudgeAnswer(Struct, frozen=True):
    text: str
    is_cached: bool


class Judge:
    """`open` makes one."""

    def __init__(self, name: str, config: JudgeConfig, http: httpx.AsyncClient, cache: Path, log: Path) -> None:
        self.name, self._config, self._http = name, config, http
        self._rubric = config.rubric or _read_rubric(name, config)
        self._api = chat_api(config.api, config.endpoint)
        self._slots = asyncio.Semaphore(config.concurrency)
        cache.parent.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._known = {row["key"]: str(row["answer"]) for row in read_lines(cache) if "key" in row and "answer" in row}
        spent = [row for row in read_lines(log) if row.get("judge") == name]
        self._spent = JudgeCounts(calls=len(spent), tokens=sum(int(row.get("tokens", 0)) for row in spent))
        """What the run has spent, earlier attempts at it included."""
        self._cache, self._log = LineFile(cache), LineFile(log)
        self._asked: dict[str, asyncio.Task[str]] = {}
        """Questions that are on their way, so that the same one is not paid for twice."""
        self._counts = JudgeCounts()

    @classmethod
    @asynccontextmanager
    async def open(cls, name: str, config: JudgeConfig, cache: Path, log: Path) -> AsyncIterator[Judge]:
        """`cache` has answers of all runs, `log` the calls of this one. Raises JudgeError."""
        key = os.environ.get(config.key_env) if config.key_env else ""
        if key is None:
            raise JudgeError(f"judges.{name}.key_env: the environment variable {config.key_env} is not set")
        headers = chat_api(config.api, config.endpoint).headers(key or "none")
        timeout = httpx.Timeout(CALL_S, connect=CONNECT_S)
        async with httpx.AsyncClient(base_url=config.endpoint, headers=headers, timeout=timeout) as http:
            judge = cls(name, config, http, config.cache or cache, log)
            try:
                yield judge
            finally:
                judge._close()

    async def grade(self, task: Task, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Returns what it says about each. Raises JudgeError if a bound or an error should end the run."""
        if self._config.mode == "rank":
            return await self._ranked(task, rollouts)
        return list(await asyncio.gather(*(self._scored(task, rollout) for rollout in rollouts)))

    def take_counts(self) -> JudgeCounts:
        """Returns what was spent since the last call."""
        counts, self._counts = self._counts, JudgeCounts()
        return counts

    async def _scored(self, task: Task, rollout: Rollout) -> Judgement:
        messages = score_request(self._config, self._rubric, task, rollout)
        try:
            score, answer = await self._verdict(messages, lambda text: read_score(self._config, text))
        except (BoundReached, NoVerdict) as error:
            return self._failed(error)
        return Judgement(judge=self.name, score=score, answer=answer.text, is_cached=answer.is_cached)

    async def _ranked(self, task: Task, rollouts: Sequence[Rollout]) -> list[Judgement]:
        if len(rollouts) < 2:
            return [self._failed(NoVerdict("there is nothing to compare it with")) for _ in rollouts]
        order = list(range(len(rollouts)))
        random.Random(f"ranking/{task.id}/{rollouts[0].seed}").shuffle(order)  # judges prefer some places
        messages = rank_request(self._config, self._rubric, task, [rollouts[index] for index in order])
        try:
            scores, answer = await self._verdict(messages, lambda text: read_ranking(len(rollouts), text))
        except (BoundReached, NoVerdict) as error:
            return [self._failed(error) for _ in rollouts]
        placed = dict(zip(order, scores, strict=True))
        shown = f"shown as {', '.join(str(order.index(index) + 1) for index in range(len(order)))}: {answer.text}"
        return [
            Judgement(judge=self.name, score=placed[index], answer=shown, is_cached=answer.is_cached)
            for index in range(len(rollouts))
        ]

    def _failed(self, error: BoundReached | NoVerdict) -> Judgement:
        is_limit = isinstance(error, BoundReached)
        outcome: Fallback = self._config.on_limit if is_limit else self._config.on_error
        if outcome == "stop":
            key = "on_limit" if is_limit else "on_error"
            raise JudgeError(f"judge {self.name}: {error} (judges.{self.name}.{key} is stop)")
        self._counts.failed += 1
        return Judgement(judge=self.name, score=0.0 if outcome == "lowest" else None, error=str(error))

    async def _verdict(self, messages: list[Message], read: Callable[[str], T | None]) -> tuple[T, JudgeAnswer]:
        """Asks until there is a verdict. Raises BoundReached, NoVerdict."""
        answer = JudgeAnswer("", is_cached=True)
        for _ in range(self._config.attempts):
            answer = await self._ask(messages)
            if (found := read(answer.text)) is not None:
                return found, answer
            reply: Message = {"role": "assistant", "content": answer.text}
            messages = [*messages, reply, {"role": "user", "content": AGAIN}]
        raise NoVerdict(f"there is no verdict in its answer: {' '.join(answer.text.split())[:200]!r}")

    async def _ask(self, messages: list[Message]) -> JudgeAnswer:
        key = self._key(messages)
        if key in self._known:
            self._counts.cached += 1
            return JudgeAnswer(self._known[key], is_cached=True)
        if (task := self._asked.get(key)) is None:
            task = self._asked[key] = asyncio.create_task(self._call(key, messages), name=f"judge {self.name}")
            task.add_done_callback(lambda _: self._asked.pop(key, None))
        return JudgeAnswer(await asyncio.shield(task), is_cached=False)

    def _key(self, messages: list[Message]) -> str:
        """The same for the same question to the same model; the messages have the rubric and what is judged."""
        config = self._config
        key_parts = [config.model, self._api.name, config.max_tokens, config.temperature, messages]
        return hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()

    async def _call(self, key: str, messages: list[Message]) -> str:
        config = self._config
        async with self._slots:
            self._check_bounds()
            self._spent.calls += 1
            options = {"max_tokens": config.max_tokens, "temperature": config.temperature}
            body = self._api.body(config.model, messages, options)
            tokens = 0
            try:
                got = await post_json(self._http, self._api.path, body, patience_s=config.patience_s)
                answer = self._api.answer(got)
                tokens = answer.tokens
            except CallFailure as error:
                raise NoVerdict(str(error)) from None
            except NotAnAnswer as error:
                raise NoVerdict(f"{config.endpoint} does not answer in the form of {self._api.name}: {error}") from None
            finally:
                self._spent.tokens += tokens
                self._counts.calls += 1
                self._counts.tokens += tokens
                self._log.append({"judge": self.name, "key": key, "tokens": tokens})
        self._known[key] = answer.text
        self._cache.append({"key": key, "model": config.model, "answer": answer.text, "tokens": tokens})
        return answer.text

    def _check_bounds(self) -> None:
        config = self._config
        if config.max_calls is not None and self._spent.calls >= config.max_calls:
            raise BoundReached(f"the run has made its {config.max_calls} calls (judges.{self.name}.max_calls)")
        if config.max_total_tokens is not None and self._spent.tokens >= config.max_total_tokens:
            raise BoundReached(
                f"the run has used {self._spent.tokens} of {config.max_total_tokens} tokens "
                f"(judges.{self.name}.max_total_tokens)"
            )

    def _close(self) -> None:
        for task in self._asked.values():
            task.cancel()
        self._cache.close()
        self._log.close()


def _read_rubric(name: str, config: JudgeConfig) -> str:
    assert config.rubric_file is not None  # the config says so
    try:
        return config.rubric_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"judges.{name}.rubric_file: {error}") from None
