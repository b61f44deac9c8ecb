"""What each metric means and what is healthy, in the words of `docs/training-metrics.md`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

FILE = Path(__file__).with_name("metric_words.json")
PLACEHOLDER = re.compile(r"<\w+>")


class MetricWords(Struct, frozen=True):
    name: str
    """As the page has it, with `<k>` and the like for what a run fills in."""
    meaning: str
    healthy: str


@cache
def all_words() -> list[MetricWords]:
    return msgspec.json.decode(FILE.read_bytes(), type=list[MetricWords])


@cache
def explain(name: str) -> MetricWords | None:
    """The words for a metric; of several that fit, those that leave the least open."""
    found = [words for words in all_words() if _pattern(words.name).fullmatch(name)]
    return min(found, key=lambda words: len(PLACEHOLDER.findall(words.name)), default=None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, PLACEHOLDER.split(name))))
