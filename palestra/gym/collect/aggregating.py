"""Metrics of a collection's results, made by the agents that played them.

Owns: asking agents, what of a result they need, the metrics file. Never touches: the formulas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from palestra.gym.collect.directory import Directory
from palestra.gym.collect.errors import CollectError
from palestra.gym.collect.files import write_whole
from palestra.gym.http_client import CallFailed, HttpClient
from palestra.gym.metrics import aggregate
from palestra.gym.records import AGENT_REF, PARAMS
from palestra.types.gym_failures import plain_words

_HEAVY = frozenset({"response", PARAMS, "ng_agent_observations", "ng_model_call_capture", "ng_trajectory"})
LIMIT_S = 600.0


def by_agent(results: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    agents: dict[str, list[Mapping[str, Any]]] = {}
    for one in results:
        agents.setdefault((one.get(AGENT_REF) or {}).get("name") or "", []).append(one)
    return agents


async def aggregated(
    results: Sequence[Mapping[str, Any]], directory: Directory, client: HttpClient
) -> list[dict[str, Any]]:
    """An entry for each agent, as `_aggregate_metrics.json` has them. Raises CollectError."""
    agents = by_agent(results)
    entries = await asyncio.gather(*(_asked(name, own, directory, client) for name, own in agents.items()))
    return [_entry(name, metrics) for name, metrics in zip(agents, entries, strict=True)]


def aggregated_here(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same without servers, and so without the metrics that are a server's own."""
    return [_entry(name, aggregate([stripped(one) for one in own])) for name, own in by_agent(results).items()]


def save_metrics(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    write_whole(path, orjson.dumps(list(entries), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))


def stripped(result: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is large: of the response, its usage is kept."""
    kept = {name: value for name, value in result.items() if name not in _HEAVY}
    response = result.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    return kept | {"response": {"usage": usage}} if usage else kept


async def _asked(
    name: str, results: Sequence[Mapping[str, Any]], directory: Directory, client: HttpClient
) -> dict[str, Any]:
    body = orjson.dumps({"verify_responses": [stripped(one) for one in results]}, option=orjson.OPT_NON_STR_KEYS)
    url = f"{directory.agent(name)}/aggregate_metrics"
    try:
        reply = await client.post(url, body, timeout_s=LIMIT_S)
        if reply.status != 200:
            raise CollectError(f"{name} cannot aggregate: HTTP {reply.status}: {plain_words(reply.body)}")
        return reply.json()
    except (CallFailed, TimeoutError, ValueError) as error:
        raise CollectError(f"{name} cannot aggregate: {type(error).__name__}: {error}") from error


def _entry(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        AGENT_REF: {"name": name},
        **{key: metrics.get(key) for key in ("agent_metrics", "key_metrics", "group_level_metrics")},
    }
