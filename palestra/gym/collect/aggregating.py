"""Metrics of a collection's results, computed by the agents that played them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import orjson

from palestra.environments.gym.directory import ServerDirectory
from palestra.gym.collect.files import OutputFiles, read_lines, write_whole
from palestra.gym.collect.rows import agent_of
from palestra.gym.errors import CollectError
from palestra.gym.metrics import RolloutMetrics, aggregate
from palestra.net.http_client import CallFailed, HttpClient
from palestra.types.gym import AGENT_REF, PARAMS, TASK_INDEX
from palestra.types.gym_failures import class_in, error_text
from palestra.util.json_types import JsonMapping, JsonObject

_HEAVY = frozenset({"response", PARAMS, "ng_agent_observations", "ng_model_call_capture", "ng_trajectory"})
LIMIT_S = 600.0


class AgentName(TypedDict):
    name: str


class AgentMetrics(RolloutMetrics):
    """An entry of `_aggregate_metrics.json`."""

    agent_ref: AgentName


class AgentReport(AgentMetrics):
    """An entry with the failed attempts by class."""

    failed_attempts: dict[str, int]


def by_agent(results: Iterable[JsonMapping]) -> dict[str, list[JsonMapping]]:
    agents: dict[str, list[JsonMapping]] = {}
    for one in results:
        agents.setdefault((one.get(AGENT_REF) or {}).get("name") or "", []).append(one)
    return agents


async def aggregated(
    results: Sequence[JsonMapping], directory: ServerDirectory, client: HttpClient
) -> list[AgentMetrics]:
    """Returns an entry for each agent. Raises CollectError."""
    agents = by_agent(results)
    entries = await asyncio.gather(*(_aggregated_by(name, own, directory, client) for name, own in agents.items()))
    return [_entry(name, metrics) for name, metrics in zip(agents, entries, strict=True)]


def aggregated_here(results: Sequence[JsonMapping]) -> list[AgentMetrics]:
    """The same without servers, and therefore without metrics that a server computes itself."""
    return [_entry(name, aggregate([stripped(one) for one in own])) for name, own in by_agent(results).items()]


def save_metrics(path: Path, entries: Sequence[JsonMapping]) -> None:
    write_whole(path, orjson.dumps(list(entries), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))


def stripped(result: JsonMapping) -> JsonObject:
    """Returns a result without its large parts: only the usage of the response is kept."""
    kept = {name: value for name, value in result.items() if name not in _HEAVY}
    response = result.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    return kept | {"response": {"usage": usage}} if usage else kept


async def _aggregated_by(
    name: str, results: Sequence[JsonMapping], directory: ServerDirectory, client: HttpClient
) -> RolloutMetrics:
    body = orjson.dumps({"verify_responses": [stripped(one) for one in results]}, option=orjson.OPT_NON_STR_KEYS)
    url = f"{directory.agent(name)}/aggregate_metrics"
    try:
        reply = await client.post(url, body, timeout_s=LIMIT_S)
        if reply.status != 200:
            raise CollectError(f"{name} cannot aggregate: HTTP {reply.status}: {error_text(reply.body)}")
        return reply.json()
    except (CallFailed, TimeoutError, ValueError) as error:
        raise CollectError(f"{name} cannot aggregate: {type(error).__name__}: {error}") from error


def _entry(name: str, metrics: RolloutMetrics) -> AgentMetrics:
    """Returns an agent's entry; fields that a server of another project leaves out are null."""
    return {
        "agent_ref": {"name": name},
        "agent_metrics": metrics.get("agent_metrics"),
        "key_metrics": metrics.get("key_metrics"),
        "group_level_metrics": metrics.get("group_level_metrics"),
    }


FAILED_ATTEMPTS = "failed_attempts"
"""Key beside the metrics of an agent or a task: number of failed attempts by class."""


class FailedAttempts:
    def __init__(self, outputs: Iterable[Path]) -> None:
        """Reads the failures of the collections with these outputs. Raises CollectError."""
        self.by_agent: dict[str, Counter[str]] = defaultdict(Counter)
        self.by_task: dict[Any, Counter[str]] = defaultdict(Counter)
        for output in outputs:
            for line in read_lines(OutputFiles(output).failures):
                kind = class_in(line)
                self.by_agent[agent_of(line) or ""][kind] += 1
                self.by_task[line.get(TASK_INDEX)][kind] += 1

    def beside_agents(self, entries: list[AgentMetrics]) -> list[AgentReport]:
        """Adds failures to the metrics by agent; an agent whose attempts all failed has an entry, too."""
        known = {entry[AGENT_REF]["name"] for entry in entries}
        only_failed = [_entry(name, aggregate([])) for name in sorted(self.by_agent.keys() - known)]
        return [
            {**entry, "failed_attempts": dict(self.by_agent.get(entry[AGENT_REF]["name"], {}))}
            for entry in [*entries, *only_failed]
        ]


def counted(failures: Counter[str]) -> str:
    """Formats counts for people, the most frequent first."""
    return ", ".join(f"{count} {kind}" for kind, count in failures.most_common())
