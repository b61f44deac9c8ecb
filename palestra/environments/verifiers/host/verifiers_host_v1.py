"""Environments with the v1 interface of verifiers (a taskset, and the agents that play it); part of the host."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1.interception.server as interception_server
from verifiers.v1.clients import EvalClientConfig, ModelContext, resolve_client
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.env import RunSlot
from verifiers.v1.runtimes import PrimeConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

JsonObject = dict[str, Any]
AGENT_HEADER = "X-Palestra-Agent"


class AttemptClientConfig(EvalClientConfig):
    """The endpoint of the run's own model."""


class Attempt:
    """The calls of an episode's traces: with which key, under which names, with which seeds."""

    def __init__(self, api_key: str, seed: int) -> None:
        self.api_key, self._seed = api_key, seed
        self.names: dict[str, str] = {}
        """Names by the ids of the traces."""
        self._of_agent: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def add(self, trace: Any) -> None:
        agent = trace.agent.name
        self._of_agent[agent] += 1
        number = self._of_agent[agent]
        self.names[trace.id] = agent if number == 1 else f"{agent}-{number}"

    def next_seed(self, trace_id: str) -> int:
        """Returns another seed for each call of each trace, the same whenever the episode is played."""
        self._calls[trace_id] += 1
        place = list(self.names).index(trace_id)
        return (self._seed + 1_000_003 * place + self._calls[trace_id] - 1) % 2**31


ATTEMPTS: dict[str, Attempt] = {}
"""Attempts by the ids of the traces that are being played, which verifiers' client sends with each call."""


class AttemptClient(EvalClient):
    """verifiers' own client; each call has the key of the attempt for which it is."""

    async def get_response(
        self, dialect: Any, body: dict, sampling: Any, session_id: Any = None, *more: Any, **named: Any
    ):
        return await super().get_response(dialect, _seeded(body, session_id), sampling, session_id, *more, **named)

    async def relay(self, dialect: Any, body: dict, session_id: Any = None, *more: Any, **named: Any):
        return await super().relay(dialect, _seeded(body, session_id), session_id, *more, **named)

    def _headers(self, dialect: Any, incoming: Any, session_id: str | None) -> Any:
        headers = super()._headers(dialect, incoming, session_id)
        if session_id is not None and (attempt := ATTEMPTS.get(session_id)) is not None:
            headers.update(dialect.auth_headers(attempt.api_key))
            headers[AGENT_HEADER] = attempt.names[session_id]
        return headers


def _seeded(body: JsonObject, session_id: str | None) -> JsonObject:
    if session_id not in ATTEMPTS or body.get("seed") is not None:
        return body
    return {**body, "seed": ATTEMPTS[session_id].next_seed(session_id)}


def _resolve(config: Any) -> Any:
    return AttemptClient(config) if isinstance(config, AttemptClientConfig) else resolve_client(config)


interception_server.resolve_client = _resolve


class Hosted:
    interface = "v1"
    is_grouped = False

    def __init__(self, name: str, args: JsonObject, env: JsonObject) -> None:
        self._config = {**env, "taskset": {**args, "id": name}}
        self._env: Any = None
        self._tasks: list[Any] = []
        self._unread: Iterator[Any] = iter(())
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        self._env = load_environment(resolve_env_config(self._on_this_machine()))
        self._unread = iter(self._env.taskset)
        await self._stack.enter_async_context(self._env.serving())

    def _on_this_machine(self) -> JsonObject:
        """Returns the config with processes of this machine in place of Prime's sandboxes, which need an account; what
        a config names stays."""
        kind = env_config_type(self._config["taskset"]["id"], self._config.get("id") or "")
        config = dict(self._config)
        for name, agent in agent_config_fields(kind.model_construct()).items():
            own = dict(config.get(name) or {})
            if "runtime" not in own and isinstance(agent.runtime, PrimeConfig):
                config[name] = {**own, "runtime": {"type": "subprocess"}}
        return config

    async def close(self) -> None:
        await self._stack.aclose()

    def tasks(self, split: str, limit: int) -> list[JsonObject]:
        """Returns the tasks, which are not divided into splits: another part of them is another taskset's."""
        if split == "eval":
            return []
        self._read(limit)
        return [
            {"index": place, "key": task.data.id or task.data.name, "prompt": _prompt(task.data)}
            for place, task in enumerate(self._tasks[:limit])
        ]

    def _read(self, count: int) -> None:
        self._tasks += itertools.islice(self._unread, max(0, count - len(self._tasks)))

    async def play(
        self,
        split: str,
        index: int,
        base_url: str,
        model: str,
        sampling: JsonObject,
        attempts: list[JsonObject],
    ) -> list[JsonObject]:
        self._read(index + 1)
        context = ModelContext(
            model=model,
            client=AttemptClientConfig(base_url=base_url, api_key_var="PALESTRA_NO_KEY"),
            sampling=SamplingConfig(**sampling),
        )
        return [await self._play_one(self._tasks[index], context, one) for one in attempts]

    async def _play_one(self, task: Any, context: Any, of: JsonObject) -> JsonObject:
        attempt = Attempt(of["api_key"], of["seed"])

        def minted(trace: Any) -> None:
            attempt.add(trace)
            ATTEMPTS[trace.id] = attempt

        try:
            episode = await self._env.run_slot(RunSlot(task), context, on_trace=minted)
        finally:
            for trace_id in attempt.names:
                ATTEMPTS.pop(trace_id, None)
        return _outcome(episode, attempt, self._env.complete(episode))


def _outcome(episode: Any, attempt: Attempt, is_complete: bool) -> JsonObject:
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    usage = episode.usage
    shown = trained[0] if trained else episode.traces[0] if episode.traces else None
    rewards = {attempt.names[trace.id]: trace.reward for trace in trained}
    alone = len(rewards) == 1
    return {
        "reward": next(iter(rewards.values())) if alone else None,
        "agents": rewards,
        "rewards": {
            name if alone else f"{attempt.names[trace.id]}/{name}": one.score
            for trace in trained
            for name, one in trace.rewards.items()
            if one is not None
        },
        "metrics": {
            name if alone else f"{attempt.names[trace.id]}/{name}": value
            for trace in trained
            for name, value in trace.metrics.items()
            if value is not None
        },
        "messages": [] if shown is None or not shown.branches else [*map(message_to_wire, shown.branches[-1].messages)],
        "stop": "" if shown is None else shown.stop_condition or "",
        "is_cut": shown is not None and bool(shown.calls) and shown.calls[-1].finish_reason == "length",
        "read": 0 if usage is None else usage.input_tokens,
        "sampled": 0 if usage is None else usage.completion_tokens,
        "error": None if is_complete else _error(episode, trained),
    }


def _error(episode: Any, traces: list[Any]) -> dict[str, str]:
    for one in (episode, *traces, *episode.traces):
        if one.errors:
            return {"type": one.errors[-1].type, "message": one.errors[-1].message}
    return {"type": "EpisodeFailed", "message": "verifiers says that the episode is not complete"}


def _prompt(data: Any) -> list[JsonObject]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is None or isinstance(data.prompt, str):
        return [*system, *([{"role": "user", "content": data.prompt}] if data.prompt else [])]
    return [*system, *map(message_to_wire, data.prompt)]
