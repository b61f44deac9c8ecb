"""Counters and histograms for what happens thousands of times a second.

Owns: counting under labels, telling it to Prometheus. Never touches: names, what is counted.

Those of prometheus_client look for labels and take a lock each time, which costs more than answering a short call may.
These are counted on the event loop alone; a scrape may come from anywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Counts(Collector):
    """One for each combination of labels that was asked for."""

    def __init__(self, registry: CollectorRegistry, name: str, words: str, labels: Sequence[str] = ()) -> None:
        self._name, self._words, self._labels = name, words, list(labels)
        self._known: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def of(self, *labels: str) -> Count:
        found = self._known.get(labels)
        if found is None:
            found = self._known[labels] = Count()
        return found

    def collect(self) -> Iterator[Metric]:
        told = CounterMetricFamily(self._name, self._words, labels=self._labels)
        for labels, one in list(self._known.items()):
            told.add_metric(labels, one.value)
        yield told


class Spread:
    """How many were up to each bound."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Spreads(Collector):
    """One for each combination of labels that was asked for."""

    def __init__(
        self, registry: CollectorRegistry, name: str, words: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self._name, self._words, self._labels, self._bounds = name, words, list(labels), bounds
        self._marks = [*map(floatToGoString, bounds), "+Inf"]
        self._known: dict[tuple[str, ...], Spread] = {}
        registry.register(self)

    def of(self, *labels: str) -> Spread:
        found = self._known.get(labels)
        if found is None:
            found = self._known[labels] = Spread(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        told = HistogramMetricFamily(self._name, self._words, labels=self._labels)
        for labels, one in list(self._known.items()):
            up_to = accumulate(one.counts)
            told.add_metric(labels, list(zip(self._marks, up_to, strict=True)), one.total)
        yield told
