"""A gym that NeMo RL drives: it takes rows and streams their logs of messages with token ids as they finish.

`ray_actor.py` makes it a Ray actor.

    gym = NemoRlGym({"model_name": "policy", "base_urls": ["http://127.0.0.1:8000/v1"], ...})
    async for index, result, timing in gym.run_rollouts(rows, "timing"):
        ...
    await gym.shutdown()
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing

from palestra.environments.gym.directory import ServerDirectory
from palestra.gym.collect.collection import play_all
from palestra.gym.collect.playing import PlayedRow, RowPlayer
from palestra.gym.collect.rows import Row, agent_of
from palestra.gym.config import ReservedPorts, load_gym
from palestra.gym.errors import GymError, ServerStartError
from palestra.gym.nemo_rl.results import NemoRlResultReader, NemoRlRowFailed, RowUnreachable, TokenDecoder
from palestra.gym.nemo_rl.settings import read_nemo_rl_settings
from palestra.gym.records import ROW_INDEX
from palestra.gym.supervisor import Supervisor
from palestra.net.http_client import HttpClient
from palestra.rollouts.gym.row_calls import RetryPolicy
from palestra.types.gym import FAILURE_CLASS, FAILURE_REASON, ROLLOUT_INDEX, TASK_INDEX
from palestra.types.gym_failures import FINAL, FailureClass, RowFailure
from palestra.util.json_types import JsonMapping, JsonObject

log = logging.getLogger(__name__)

Streamed = tuple[int, JsonObject, dict[str, float] | None]
SERVERS_OWN = frozenset(FailureClass) - FINAL - {FailureClass.BAD_ANSWER, FailureClass.NOT_KEPT}
"""Failures of servers: the same row may succeed later."""


class NemoRlGym:
    """A gym that starts when it is first needed, and again after `shutdown`. It is used on one event loop."""

    def __init__(self, config: JsonMapping, report: Callable[[str], None] = log.info) -> None:
        """Raises GymConfigError. `report` gets the output of the servers and changes of their state."""
        self._settings = read_nemo_rl_settings(config)
        self._report = report
        self._reader = NemoRlResultReader(self._settings)
        self._stack: AsyncExitStack | None = None
        self._starting = asyncio.Lock()  # protects the start: two callers share one gym
        self._supervisor: Supervisor | None = None
        self._watching: asyncio.Task[None] | None = None
        self._player: RowPlayer | None = None
        self.counts: Counter[str] = Counter()
        """`rows`, `failed`, `failed_<class>` and `masked_<why>`, since the beginning."""

    async def spin_up(self) -> None:
        """Waits until every server is healthy. Raises GymError."""
        async with self._starting:
            if self._stack is None:
                self._stack = await self._started()

    async def health_check(self) -> None:
        """Raises GymError with the servers that are not healthy."""
        await self.spin_up()
        assert self._supervisor is not None
        assert self._watching is not None
        if self._watching.done():
            self._watching.result()
        instances = self._supervisor.instances()
        ill = [f"{one['process_name']} ({one['state']})" for one in instances if one["state"] != "healthy"]
        if ill:
            raise ServerStartError(f"not healthy: {', '.join(ill)}")

    def set_tokenizer(self, tokenizer: TokenDecoder | None) -> None:
        """Sets the tokenizer for texts beside the ids; without one there are none."""
        self._reader.tokenizer = tokenizer

    async def run_rollouts(self, examples: Sequence[Row], timer_prefix: str = "timing") -> AsyncGenerator[Streamed]:
        """Yields `(row["_rowidx"], result, timing)` in the order they are finished; timing comes with the last. A row
        that fails gives a masked result; with `is_strict` it raises NemoRlRowFailed."""
        rows = _checked(examples)
        await self.spin_up()
        assert self._player is not None
        clock = _Clock()
        counted: Counter[str] = Counter()
        left = len(rows)
        async with aclosing(play_all(self._player, rows, len(rows))) as played:
            async for one in played:
                left -= 1
                with clock:
                    result = self._read(one, counted)
                yield one.row[ROW_INDEX], result, None if left else clock.sent(timer_prefix, counted)

    async def shutdown(self) -> None:
        async with self._starting:
            stack, self._stack = self._stack, None
            if stack is not None:
                await stack.aclose()

    def _read(self, played: PlayedRow, counted: Counter[str]) -> JsonObject:
        self._count("rows", counted)
        if played.result is not None:
            try:
                result, flaw = self._reader.read(played.result)
            except NemoRlRowFailed as error:
                return self._given_up(RowFailure.of(FailureClass.BAD_ANSWER, str(error)).fields(), counted)
            if flaw is not None:
                self._count(f"masked_{flaw}", counted)
            return result
        not_kept = RowFailure.of(FailureClass.NOT_KEPT, "its agent asks not to store it").fields()
        return self._given_up(played.failures[-1] if played.failures else not_kept, counted)

    def _given_up(self, failure: JsonMapping, counted: Counter[str]) -> JsonObject:
        if self._settings.is_strict:
            raise _as_error(failure)
        self._count("failed", counted)
        self._count(f"failed_{failure[FAILURE_CLASS]}", counted)
        return self._reader.failed(failure)

    def _count(self, what: str, counted: Counter[str]) -> None:
        counted[what] += 1
        self.counts[what] += 1

    async def _started(self) -> AsyncExitStack:
        async with AsyncExitStack() as stack:
            ports = stack.enter_context(ReservedPorts())
            config = load_gym(self._settings.sources(), ports=ports, report=self._report)
            self._supervisor = await stack.enter_async_context(Supervisor(config, ports, self._report))
            await self._supervisor.ready()
            self._watching = asyncio.create_task(self._supervisor.run(), name="nemo-rl-gym-watch")
            stack.callback(self._watching.cancel)
            client = await stack.enter_async_context(HttpClient())
            directory = await ServerDirectory.of_head(client, self._supervisor.head_url)
            patience = RetryPolicy(attempts=self._settings.attempts, run_limit_s=self._settings.row_timeout_s)
            self._player = RowPlayer(client, directory, patience)
            return stack.pop_all()


class _Clock:
    """Measures how much of the time was spent on reading results; the rest was waiting."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._reading_s = 0.0
        self._entered = 0.0

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._reading_s += time.perf_counter() - self._entered

    def sent(self, prefix: str, counted: Mapping[str, int]) -> dict[str, float]:
        total_s = time.perf_counter() - self._began
        times = {
            "await_results": total_s - self._reading_s,
            "postprocess_results": self._reading_s,
            "postprocess_results_pct": 100 * self._reading_s / total_s,
        }
        return {f"{prefix}/{name}": float(value) for name, value in {**times, **counted}.items()}


def _checked(examples: Sequence[Row]) -> list[Row]:
    """Adds the indices that every row needs. Raises ValueError."""
    if not examples:
        raise ValueError("there are no rows to play")
    rows: list[Row] = []
    for place, one in enumerate(examples):
        index = one.get(ROW_INDEX)
        if type(index) is not int:
            raise ValueError(f"row {place} needs {ROW_INDEX}, a whole number, but has {index!r}")
        if agent_of(one) is None:
            raise ValueError(f"row {place} ({ROW_INDEX} {index}) names no agent; add agent_ref to it")
        rows.append({TASK_INDEX: index, ROLLOUT_INDEX: index, **one})
    indices = Counter(row[ROW_INDEX] for row in rows)
    if twice := [index for index, count in indices.items() if count > 1]:
        raise ValueError(f"{ROW_INDEX} {twice[0]} occurs more than once")
    return rows


def _as_error(failure: JsonMapping) -> GymError:
    kind = failure[FAILURE_CLASS]
    text = f"{kind}: {failure.get(FAILURE_REASON) or failure}"
    return RowUnreachable(text) if kind in SERVERS_OWN else NemoRlRowFailed(text)
