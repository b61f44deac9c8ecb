"""Rebuilds the token ids of a rollout whose agent lost them: joins the captured calls by their prefixes.

A call's parent is the earlier one with the most ids, prompt and generation, that its own prompt begins with. Calls with
the same prompt are attempts at one answer: the one that was continued counts.

calls      p -> a          p a q -> b          p a q -> c          p a q b r -> d
delivered  a, b, d         b and c are attempts at one answer, and d continues b
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict

from palestra.types.gym import MASK_SAMPLE, ROUTED_EXPERTS, TOKEN_FIELDS
from palestra.types.openai import ResponseItem
from palestra.util.json_types import JsonMapping, JsonObject

CAPTURE = "_ng_token_capture"


class MergeFault(StrEnum):
    """Why a rollout is not trained on."""

    MISSING = "missing"
    """There are calls without ids, or none at all."""
    RETRIES = "ambiguous_retries"
    """There are several answers to one prompt, and it is unknown which one was used."""
    FORK = "ambiguous_fork"
    """Two conversations continued from one answer."""


@dataclass(slots=True)
class _Call:
    entry: JsonMapping
    prompt: bytes
    whole: bytes
    parent: _Call | None = None
    attempts: dict[bytes, list[_Call]] = field(default_factory=lambda: defaultdict(list))
    """Calls that continue from here, by their prompts."""


class MergeMetrics(TypedDict):
    """What a row says about its merge."""

    calls: int
    delivered: int
    conversations: int
    fault: MergeFault | None


@dataclass(slots=True)
class MergedCalls:
    output: list[ResponseItem]
    """Items of the delivered calls; each call's last item has its ids, which begin with all those before it."""
    fault: MergeFault | None
    metrics: MergeMetrics


def rebuild(entries: Sequence[JsonMapping], *, is_incomplete: bool = False) -> MergedCalls:
    """Rebuilds from `entries` as they were captured, in the order the calls ended."""
    calls = _linked(sorted(entries, key=lambda entry: entry["created_at"]))
    roots: dict[bytes, list[_Call]] = defaultdict(list)
    for call in calls:
        if call.parent is None:
            roots[call.prompt].append(call)
    chain: list[_Call] = []
    fault: MergeFault | None = MergeFault.MISSING if is_incomplete or not calls else None
    attempts = next(iter(roots.values()), [])  # the conversation whose first answer came first
    while attempts:
        call = _chosen(attempts)
        if call is None:
            fault = fault or MergeFault.RETRIES
            break
        chain.append(call)
        if len(call.attempts) > 1:
            fault = fault or MergeFault.FORK
            break
        attempts = next(iter(call.attempts.values()), [])
    metrics: MergeMetrics = {"calls": len(calls), "delivered": len(chain), "conversations": len(roots), "fault": fault}
    return MergedCalls([item for call in chain for item in _items(call.entry)], fault, metrics)


def folded(row: JsonObject, rebuilt: MergedCalls, *, rebuild_response: bool = True) -> JsonObject:
    """Returns the row with its ids, or masked. A row that has ids already is not changed."""
    response = row.get("response") or {}
    if any(item.get("generation_token_ids") for item in response.get("output") or ()):
        return row
    row = {**row, CAPTURE: rebuilt.metrics}
    if rebuilt.fault is not None:
        return {**row, MASK_SAMPLE: True}
    return {**row, "response": {**response, "output": rebuilt.output}} if rebuild_response else row


def _linked(entries: Iterable[JsonMapping]) -> list[_Call]:
    calls: list[_Call] = []
    for entry in entries:
        prompt = array("q", entry["prompt_token_ids"]).tobytes()
        call = _Call(entry, prompt, prompt + array("q", entry["generation_token_ids"]).tobytes())
        for earlier in calls:
            is_longer = call.parent is None or len(earlier.whole) > len(call.parent.whole)
            if is_longer and prompt.startswith(earlier.whole):
                call.parent = earlier
        if call.parent is not None:
            call.parent.attempts[prompt].append(call)
        calls.append(call)
    return calls


def _chosen(attempts: list[_Call]) -> _Call | None:
    """Returns the answer to a prompt that was continued; any of them, if they are all equal."""
    went_on = [call for call in attempts if call.attempts]
    if len(went_on) == 1:
        return went_on[0]
    if not went_on and all(call.whole == attempts[0].whole for call in attempts):
        return attempts[0]
    return None


def _items(entry: JsonMapping) -> list[ResponseItem]:
    items = list(entry["output_items"])
    at = entry["token_item_index"]
    ids = {key: entry[key] for key in (*TOKEN_FIELDS, ROUTED_EXPERTS) if entry.get(key) is not None}
    items[at] = items[at] | ids
    return items
