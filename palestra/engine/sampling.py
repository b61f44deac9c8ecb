"""Samples: those that wait for their weights, those that wait for a place, those that run.

Owns: the life of a sample in this worker. Never touches: training, where weights are kept.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from palestra.engine.backend import ComputeBackend, SampleStep, Weights, raise_if_broken
from palestra.engine.queues import ModelTable, failure_of
from palestra.engine.sampler_cache import SamplerCache
from palestra.engine.stats import Counters
from palestra.types import SampleResult
from palestra.types.engine import (
    BaseModel,
    ChangeWeights,
    EngineFailure,
    FromWorker,
    KeptSampler,
    PlacedAdapter,
    Sample,
    Sampled,
    SavedAdapter,
    Streamed,
    StreamedTokens,
)
from palestra.util.round_robin import RoundRobin

log = logging.getLogger(__name__)

GAPS = 512
STREAM_EVERY_S = 0.02  # tokens are told this often: a message for each would cost more than drawing it


@dataclass(slots=True)
class ActiveSample:
    sample: Sample
    weights_key: int | None
    cost_before: float
    """Cost of one sequence before it began, by the executor's clock."""
    unsent: dict[int, StreamedTokens] = field(default_factory=dict)
    """Tokens of a stream that were not sent yet, by sequence."""


@dataclass(slots=True)
class PinnedWeights:
    size_bytes: int
    samples: int = 0


class SamplingExecutor:
    def __init__(
        self,
        backend: ComputeBackend,
        table: ModelTable,
        sampler_cache: SamplerCache,
        counters: Counters,
        send: Callable[[FromWorker], None],
        *,
        max_rows: int,
        placed_folder: Callable[[str], str],
    ):
        self.backend, self.table, self.sampler_cache, self.counters, self._send = (
            backend,
            table,
            sampler_cache,
            counters,
            send,
        )
        self._placed_folder = placed_folder
        """Where the adapter with this digest is."""
        self._max_rows = 2 * max_rows  # enough to keep the batch full; the rest waits without holding weights
        self._waiting: dict[str, dict[str, Sample]] = {}
        """By the model whose request will make their sampler."""
        self._queued: dict[str, Sample] = {}
        self._lines: RoundRobin[OrderedDict[str, Sample]] = RoundRobin()
        """The queued ones in line, by owner and by the weights they sample from."""
        self._running: dict[int, ActiveSample] = {}
        self._numbers: dict[str, int] = {}
        """Numbers at the backend of those that run."""
        self._rows = 0
        self._rows_of: Counter[str] = Counter()
        """Rows of each owner."""
        self._pinned: dict[int, PinnedWeights] = {}
        """Weights that running samples keep in memory, by their key."""
        self._cost = 0.0
        """Seconds a sequence that was here all the time has been charged."""
        self._stepped_at: float | None = None
        """When the last step ended, if any of its samples goes on."""
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._streams: set[int] = set()
        """Numbers of running samples that are streamed."""
        self._sent_at = 0.0

    @property
    def token_gap_p95_s(self) -> float:
        gaps = sorted(self._gaps)
        return gaps[len(gaps) * 95 // 100] if gaps else 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._queued or self._running)

    @property
    def waiting(self) -> int:
        return len(self._queued) + sum(len(w) for w in self._waiting.values())

    def add(self, sample: Sample) -> None:
        weights = sample.weights
        if isinstance(weights, KeptSampler) and self.sampler_cache.is_awaited(weights, self.table):
            self._waiting.setdefault(weights.model_id, {})[sample.request_id] = sample
            return
        if sample.request_id not in self._numbers:
            self._queued[sample.request_id] = sample
            self._lines.add(*_line_of(sample), OrderedDict())[sample.request_id] = sample

    def recheck(self, model_id: str) -> None:
        """The model has moved on, or is gone."""
        for sample in self._waiting.pop(model_id, {}).values():
            self.add(sample)

    def cancel(self, request_id: str) -> None:
        if request_id in self._queued:
            self._take(self._queued[request_id])
        for samples in self._waiting.values():
            samples.pop(request_id, None)
        number = self._numbers.get(request_id)
        if number is not None:
            self.backend.abort(number)
            self._leave(number)

    def change_weights(self, change: ChangeWeights) -> None:
        """Changes the weights of samples under way; those that have not begun begin with the new ones."""
        for request_id in change.request_ids:
            waiting = next((w for w in self._waiting.values() if request_id in w), None)
            if waiting is not None:
                self.add(_with_weights(waiting.pop(request_id), change.weights))
            elif (queued := self._queued.get(request_id)) is not None:
                self._take(queued)
                self.add(_with_weights(queued, change.weights))
            elif (number := self._numbers.get(request_id)) is not None:
                self._change_running(number, change)

    def _change_running(self, number: int, change: ChangeWeights) -> None:
        running, name = self._running[number], change.weights.sampler_id
        try:
            weights = self.sampler_cache.get(name)
            is_changed = self.backend.change_weights(number, weights, name, keeps_keys=change.keeps_keys)
        except Exception as e:
            raise_if_broken(self.backend, e)
            log.warning("weights_not_changed request=%s sampler=%s error=%r", running.sample.request_id, name, e)
            return
        if is_changed:
            self._unpin(running.weights_key)
            running.weights_key = self._pin(weights)

    def abort_all(self) -> None:
        self._queued.clear()
        self._lines = RoundRobin()
        self._waiting.clear()
        for number in list(self._running):
            self.backend.abort(number)
            self._leave(number)

    def quantum(self, seconds: float) -> None:
        """Steps of the whole batch for about this long."""
        end = time.perf_counter() + seconds
        self._admit()
        while self._running:
            self._step()
            if time.perf_counter() >= end:
                return
            self._admit()

    def _admit(self) -> None:
        while self._queued and self._rows < self._max_rows:
            sample = self._next()
            try:
                weights = self._weights(sample)
                if not self._can_pin(weights):
                    return
                self._take(sample)
                number = self.backend.submit(sample.request, weights)
            except Exception as e:
                self._take(sample)
                self._fail(sample, 0.0, e)
                continue
            self._running[number] = ActiveSample(sample, self._pin(weights), self._cost)
            if sample.stream:
                self._streams.add(number)
            self._numbers[sample.request_id] = number
            self._add_rows(sample, sample.request.num_samples)

    def _next(self) -> Sample:
        """Returns the next sample: of the owner with the fewest rows in the batch, or whose turn is next where several
        have as few; of its model whose turn is next; the oldest of these."""
        owner = min(self._lines.owners, key=lambda owner: self._rows_of[owner])
        _, _, line = self._lines.first(owner)
        return next(iter(line.values()))

    def _take(self, sample: Sample) -> None:
        """Removes a sample from its line."""
        if self._queued.pop(sample.request_id, None) is None:
            return
        owner, name = _line_of(sample)
        line = self._lines.get(owner, name)
        assert line is not None
        del line[sample.request_id]
        self._lines.owner_served(owner)
        self._lines.served(owner, name)
        if not line:
            self._lines.remove(owner, name)

    def _add_rows(self, sample: Sample, rows: int) -> None:
        owner = sample.request.cache_salt
        self._rows += rows
        self._rows_of[owner] += rows
        if not self._rows_of[owner]:
            del self._rows_of[owner]

    def _can_pin(self, weights: Weights | None) -> bool:
        """Holds back samples of ever more adapters at once where their memory would pass the sampler cache's bound."""
        if weights is None or not self._running or self.backend.weights_key(weights) in self._pinned:
            return True
        pinned = sum(h.size_bytes for h in self._pinned.values())
        return pinned + self.backend.own_bytes(weights) <= self.sampler_cache.memory_bytes

    def _pin(self, weights: Weights | None) -> int | None:
        if weights is None:
            return None
        key = self.backend.weights_key(weights)
        self._pinned.setdefault(key, PinnedWeights(self.backend.own_bytes(weights))).samples += 1
        return key

    def _unpin(self, key: int | None) -> None:
        if key is not None:
            self._pinned[key].samples -= 1
            if self._pinned[key].samples == 0:
                del self._pinned[key]

    def _weights(self, sample: Sample) -> Weights | None:
        match sample.weights:
            case BaseModel():
                return None
            case SavedAdapter(folder=folder):
                return self.sampler_cache.open(folder)
            case KeptSampler(sampler_id=sampler_id):
                return self.sampler_cache.get(sampler_id)
            case PlacedAdapter(digest=digest):
                return self.sampler_cache.open(self._placed_folder(digest))

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            step = self.backend.sample_step()
        except Exception as e:  # not of one request: the step itself
            for number in list(self._running):
                self.backend.abort(number)
                self._fail(*self._leave(number), e)
            return
        self._cost += (time.perf_counter() - start) / max(1, self._rows)
        self.counters.sample_steps += 1
        self.counters.sample_rows += len(step.tokens)
        self.counters.tokens_sampled += len(step.tokens)
        if self._streams:
            self._stream(step)
        for number, result in step.finished:
            self._answer(*self._leave(number), result)
        for number, error in step.failed:
            self._fail(*self._leave(number), error)
        now = time.perf_counter()
        if self._stepped_at is not None:
            self._gaps.append(now - self._stepped_at)
        self._stepped_at = now if self._running else None

    def _stream(self, step: SampleStep) -> None:
        """Sends first tokens at once, and what is left of sequences that end."""
        due = time.perf_counter() - self._sent_at > STREAM_EVERY_S
        for event in step.tokens:
            if event.request_id in self._streams:
                running = self._running[event.request_id]
                part = running.unsent.get(event.sample)
                if part is None:
                    part = StreamedTokens(request_id=running.sample.request_id, sample=event.sample)
                    running.unsent[event.sample] = part
                part.tokens.append(event.token)
                part.logprobs.append(event.logprob)
                if event.top is not None:
                    part.topk_logprobs.append(event.top)
                due = due or event.is_first
        ended = [number for number, _ in step.finished if number in self._streams]
        parts = [part for n in (self._streams if due else ended) for part in self._take_unsent(n)]
        if parts:
            self._send(Streamed(parts=parts))
        if due:
            self._sent_at = time.perf_counter()

    def _take_unsent(self, number: int) -> list[StreamedTokens]:
        untold = self._running[number].unsent
        parts = list(untold.values())
        untold.clear()
        return parts

    def _leave(self, number: int) -> tuple[Sample, float]:
        running = self._running.pop(number)
        self._streams.discard(number)
        del self._numbers[running.sample.request_id]
        self._unpin(running.weights_key)
        rows = running.sample.request.num_samples
        self._add_rows(running.sample, -rows)
        return running.sample, (self._cost - running.cost_before) * rows

    def _fail(self, sample: Sample, compute_s: float, error: Exception) -> None:
        raise_if_broken(self.backend, error)
        self._answer(sample, compute_s, failure_of(error, f"Sample request={sample.request_id}"))

    def _answer(self, sample: Sample, compute_s: float, outcome: SampleResult | EngineFailure) -> None:
        began_with = sample.weights.sampler_id if isinstance(sample.weights, KeptSampler) else ""
        self._send(Sampled(request_id=sample.request_id, outcome=outcome, compute_s=compute_s, weights=began_with))


def _with_weights(sample: Sample, weights: KeptSampler) -> Sample:
    return msgspec.structs.replace(sample, weights=weights)


def _line_of(sample: Sample) -> tuple[str, str]:
    """Returns the owner of a sample and the name of its line. Samplers that were frozen of one model, one after the
    other, have one line."""
    match sample.weights:
        case BaseModel():
            name = ""
        case SavedAdapter(folder=name) | KeptSampler(model_id=name) | PlacedAdapter(digest=name):
            pass
    return sample.request.cache_salt, name
