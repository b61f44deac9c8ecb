"""Descriptions of metrics and their healthy values, as `docs/metrics.md` says it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

FILE = Path(__file__).with_name("metric_descriptions.json")
PLACEHOLDER = re.compile(r"<\w+>")


class MetricDescription(Struct, frozen=True):
    name: str
    """The name as on the page, with `<k>` and the like for what a run fills in."""
    meaning: str
    healthy: str


@cache
def all_descriptions() -> list[MetricDescription]:
    return msgspec.json.decode(FILE.read_bytes(), type=list[MetricDescription])


@cache
def explain(name: str) -> MetricDescription | None:
    """The description of a metric; of several that fit, the one that leaves the least open."""
    found = [one for one in all_descriptions() if _pattern(one.name).fullmatch(name)]
    return min(found, key=lambda one: len(PLACEHOLDER.findall(one.name)), default=None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, PLACEHOLDER.split(name))))
