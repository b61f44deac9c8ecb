"""Rollouts of a step, or of many: filtered, counted, in groups."""

from __future__ import annotations

import marshal
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

from msgspec import Struct

from palestra.runs.reader import Part, RunReader
from palestra.runs.record_files import read_records
from palestra.runs.rollout_filter import parse_where
from palestra.runs.rollout_records import RolloutRecord
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonPayload
from palestra.view.rollouts.messages import content_text
from palestra.view.rollouts.rollout_records import ListedRecord, complete, is_number
from palestra.view.rollouts.step_cache import StepCache
from palestra.view.runs.catalogue import Catalogue

MAX_SCANNED = 20_000
"""Rollouts that are looked at if no step is named, newest first."""
MAX_SCANNED_BYTES = 32 << 20
KEPT = StepCache(32 << 20)
BINS = 12
SNIPPET = 140
FACETS = ("environment", "level", "stop", "error", "used")
UNLISTED = ("messages", "verdict", "turn_times")
"""Fields of a rollout that only its own page shows."""


class Order(StrEnum):
    SURPRISING = "surprising"
    """Groups first in which one rollout differs most from the others."""
    WORST = "worst"
    BEST = "best"
    SPREAD = "spread"
    LONGEST = "longest"
    PLAYED = "played"
    """The order in which they were played."""


class ListedGroup(Struct, frozen=True):
    """Rollouts of one task."""

    id: str
    step: int
    task: str
    environment: str
    prompt: str
    rollouts: list[ListedRecord]
    mean: float | None
    spread: float | None
    surprise: float
    """How far the rollout that differs most is from the group's mean, in standard deviations."""
    stops: dict[str, int]


class FacetValue(Struct, frozen=True):
    text: str
    count: int
    where: str
    """The condition that chooses it."""


class Facet(Struct, frozen=True):
    name: str
    values: list[FacetValue]


class Bin(Struct, frozen=True):
    low: float
    high: float
    count: int
    where: str


class RolloutList(Struct, frozen=True):
    run: str
    part: Part
    step: int | None
    """None: the newest steps."""
    steps: list[int]
    """Steps that have rollouts."""
    where: str
    order: Order
    groups: list[ListedGroup]
    total_groups: int
    total: int
    """Rollouts that fit."""
    scanned: int
    is_cut: bool
    """Whether older steps were not looked at."""
    facets: list[Facet]
    rewards: list[Bin]
    mean: float | None


class RolloutQuery(Struct, frozen=True):
    """What is asked for."""

    part: Part = Part.ROLLOUTS
    step: int | None = None
    where: str = ""
    order: Order = Order.SURPRISING
    offset: int = 0
    limit: int = 60


def list_rollouts(catalogue: Catalogue, name: str, query: RolloutQuery) -> RolloutList:
    """Raises WhereError if the condition is none, RunNotFound if the step has no rollouts."""
    run = catalogue.open(name)
    matches = parse_where(query.where) if query.where.strip() else lambda _: True
    steps = run.steps(query.part)
    records, is_cut = _read(run, query, steps)
    found = [record for record in records if matches(record)]
    groups = _groups(found)
    groups.sort(key=ORDERS[query.order])
    rewards = [reward for record in found if is_number(reward := record.get("reward"))]
    return RolloutList(
        run=name,
        part=query.part,
        step=query.step,
        steps=steps,
        where=query.where,
        order=query.order,
        groups=groups[query.offset : query.offset + query.limit],
        total_groups=len(groups),
        total=len(found),
        scanned=len(records),
        is_cut=is_cut,
        facets=_facets(found, query.where),
        rewards=_histogram(rewards, query.where),
        mean=fmean(rewards) if rewards else None,
    )


def read_step(run: RunReader, part: Part, step: int) -> Sequence[ListedRecord]:
    """Rollouts of a step without their conversations, but with how they begin and end; read once while the file stays
    as it is."""
    return marshal.loads(_read_slim(run, part, step))


def _read_slim(run: RunReader, part: Part, step: int) -> bytes:
    file = run.step_file(part, step)
    if not file.is_file():
        run.read_rollouts(step, part)  # says which steps there are
    return KEPT.get(file, lambda file: _slim(file, step))


def _slim(file: Path, step: int) -> bytes:
    """Packs rows by `marshal`, for this process alone: numbers of any size and any depth stay as they are."""
    return marshal.dumps([{**_without_messages(record), "step": step} for record in read_records(file)])


def _without_messages(record: RolloutRecord) -> JsonPayload:
    shown = complete(record)
    messages = shown["messages"]
    asked = [one for one in messages if one.get("role") == "user"] or messages
    answers = [one for one in messages if one.get("role") == "assistant"]
    kept = {name: value for name, value in shown.items() if name not in UNLISTED}
    return {**kept, "prompt": _snippet(asked[:1]), "answer": _snippet(answers[-1:], end=True)}


def _snippet(messages: Sequence[Message], *, end: bool = False) -> str:
    text = " ".join(content_text(messages[0])[-1000 if end else 0 :][:1000].split()) if messages else ""
    if len(text) <= SNIPPET:
        return text
    return f"…{text[1 - SNIPPET :]}" if end else f"{text[: SNIPPET - 1]}…"


def _read(run: RunReader, query: RolloutQuery, steps: Sequence[int]) -> tuple[list[ListedRecord], bool]:
    if query.step is not None:
        return list(read_step(run, query.part, query.step)), False
    records: list[ListedRecord] = []
    size_bytes = 0
    for at, step in enumerate(reversed(steps), 1):
        slim = _read_slim(run, query.part, step)
        size_bytes += len(slim)
        records += marshal.loads(slim)
        if len(records) >= MAX_SCANNED or size_bytes >= MAX_SCANNED_BYTES:
            return records, at < len(steps)
    return records, False


def _groups(records: Iterable[ListedRecord]) -> list[ListedGroup]:
    found: dict[tuple[object, object], list[ListedRecord]] = {}
    for record in records:
        found.setdefault((record.get("step"), record.get("group")), []).append(record)
    return [_group(rollouts) for rollouts in found.values()]


def _group(rollouts: list[ListedRecord]) -> ListedGroup:
    first = rollouts[0]
    whole = [one for one in rollouts if one.get("fork_of") is None] or rollouts  # forks stand for states, not for tasks
    rewards = [float(reward) for one in whole if is_number(reward := one.get("reward"))]
    mean, spread = (fmean(rewards), pstdev(rewards)) if rewards else (None, None)
    surprise = max(abs(reward - mean) for reward in rewards) / spread if mean is not None and spread else 0.0
    return ListedGroup(
        id=str(first.get("group")),
        step=int(first.get("step") or 0),
        task=str(first.get("task")),
        environment=str(first.get("environment")),
        prompt=str(first.get("prompt")),
        rollouts=sorted(rollouts, key=lambda one: one.get("index") or 0),
        mean=mean,
        spread=spread,
        surprise=surprise,
        stops=dict(Counter(str(one.get("stop")) for one in rollouts).most_common()),
    )


ORDERS: dict[Order, Callable[[ListedGroup], float]] = {
    Order.SURPRISING: lambda group: -group.surprise,
    Order.WORST: lambda group: math.inf if group.mean is None else group.mean,
    Order.BEST: lambda group: math.inf if group.mean is None else -group.mean,
    Order.SPREAD: lambda group: -(group.spread or 0.0),
    Order.LONGEST: lambda group: -max(one.get("tokens") or 0 for one in group.rollouts),
    Order.PLAYED: lambda group: 0.0,
}


def _facets(records: Sequence[ListedRecord], where: str) -> list[Facet]:
    found = [*(_facet(name, records, where) for name in FACETS), _lengths(records, where)]
    return [facet for facet in found if facet is not None]


def _lengths(records: Sequence[ListedRecord], where: str) -> Facet | None:
    """Rollouts by their sampled tokens: the shorter half, the longer half, and the longest tenth."""
    lengths = sorted(length for record in records if is_number(length := record.get("tokens")))
    if len(lengths) < 10 or lengths[0] == lengths[-1]:
        return None
    half, most = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    values = [FacetValue(f"under {half}", sum(one < half for one in lengths), _and(where, f"tokens<{half}"))]
    for edge in dict.fromkeys((half, most)):
        count = sum(one >= edge for one in lengths)
        values.append(FacetValue(f"{edge} and more", count, _and(where, f"tokens>={edge}")))
    return Facet("tokens", values)


def _facet(name: str, records: Sequence[ListedRecord], where: str) -> Facet | None:
    """The values of a field with their counts; none if all rollouts have the same."""
    counts = Counter(_facet_text(name, record.get(name)) for record in records)
    if len(counts) < 2:
        return None
    conditions = {text: _condition(name, text) for text, _ in counts.most_common(8)}
    values = [FacetValue(text, counts[text], _and(where, condition)) for text, condition in conditions.items()]
    return Facet(name, values)


def _facet_text(name: str, value: object) -> str:
    if name == "error":
        return "with an error" if value else "without"
    if name == "level" and value is None:
        return "unknown"
    if name == "used":
        return "unknown" if value is None else "trained on" if value else "not trained on"
    return str(value)


def _condition(name: str, text: str) -> str:
    match name, text:
        case "error", "with an error":
            return "error!=None"
        case "error", _:
            return "error=None"
        case "used" | "level", "unknown":
            return f"{name}=None"
        case "used", _:
            return "used=1" if text == "trained on" else "used=0"
    return f"{name}={text!r}"


def _and(where: str, condition: str) -> str:
    where = where.strip()
    if not where or condition in where.split(" and "):
        return where or condition
    return f"({where}) and {condition}" if " or " in where else f"{where} and {condition}"


def _histogram(rewards: Sequence[float], where: str) -> list[Bin]:
    """Few different rewards get a bar each; else the range is cut into equal parts."""
    if not rewards:
        return []
    values = sorted(set(rewards))
    if len(values) <= BINS:
        counts = Counter(rewards)
        return [Bin(value, value, counts[value], _and(where, f"reward={value!r}")) for value in values]
    return list(_equal_bins(rewards, values[0], values[-1], where))


def _equal_bins(rewards: Sequence[float], low: float, high: float, where: str) -> Iterator[Bin]:
    edges = [low + at * (high - low) / BINS for at in range(BINS)]
    counts = Counter(bisect_right(edges, reward) - 1 for reward in rewards)
    for at, (begin, end) in enumerate(pairwise([*edges, high])):
        upper = f"reward<={high!r}" if at == BINS - 1 else f"reward<{end!r}"
        yield Bin(begin, end, counts[at], _and(where, f"reward>={begin!r} and {upper}"))
