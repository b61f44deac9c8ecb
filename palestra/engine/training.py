"""Training in quanta: a forward, a backward, a step of all models that are due, or one of the small requests.

Owns: what is computed next, joining micro-batches of different models, who fails. Never touches: sampling, the link.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palestra.engine.backend import ComputeBackend, Forward, MicroBatch, raise_if_broken
from palestra.engine.checkpoint_folders import CheckpointFolders
from palestra.engine.files import name_of
from palestra.engine.queues import ModelTable, QueuedModel, RunningPass, failure_of, no_model
from palestra.engine.sampler_cache import SamplerCache
from palestra.engine.stats import Counters
from palestra.model import AdapterError, DataError, combine_metrics, router_metrics
from palestra.types.engine import (
    Blame,
    Created,
    CreateModel,
    EngineFailure,
    KeepSampler,
    Loaded,
    LoadWeights,
    OptimStep,
    Pass,
    PassResult,
    SamplerKept,
    Saved,
    SaveWeights,
    Skip,
    StepDone,
    TrainOutcome,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchPart:
    model: QueuedModel
    running: RunningPass
    batch: MicroBatch

    @property
    def is_current(self) -> bool:
        return self.model.running is self.running and not self.model.is_dropped


@dataclass(frozen=True, slots=True)
class Joined:
    parts: list[BatchPart]
    forward: Forward


class TrainingExecutor:
    def __init__(
        self,
        backend: ComputeBackend,
        table: ModelTable,
        sampler_cache: SamplerCache,
        checkpoints: CheckpointFolders,
        counters: Counters,
        *,
        max_models: int,
        on_applied: Callable[[QueuedModel], None],
    ):
        self.backend, self.table, self.sampler_cache, self.checkpoints, self.counters = (
            backend,
            table,
            sampler_cache,
            checkpoints,
            counters,
        )
        self.max_models, self._on_applied = max_models, on_applied
        self._half_done: Joined | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.table.ready) or self._half_done is not None

    def quantum(self) -> None:
        if self._half_done is not None:
            self._backward()
            return
        model = self.table.next()
        operation = model.requests[0].operation
        if model.weights is None and not isinstance(operation, CreateModel):
            self._finish(model, no_model(model.model_id), 0.0)
        elif isinstance(operation, Pass):
            self._forward(model)
        elif isinstance(operation, OptimStep):
            self._optim_step()
        else:
            self._single(model, operation)

    # One request alone

    def _single(
        self, model: QueuedModel, operation: CreateModel | KeepSampler | LoadWeights | SaveWeights | Skip
    ) -> None:
        start = time.perf_counter()
        outcome: TrainOutcome | None
        try:
            match operation:
                case CreateModel():
                    outcome = self._create(model, operation)
                case LoadWeights():
                    self.backend.load(model.weights, self._find(operation.folder), optimizer=operation.optimizer)
                    self.sampler_cache.may_have_grown = True
                    outcome = Loaded()
                case KeepSampler():
                    self.sampler_cache.keep(operation.sampler_id, model)
                    outcome = SamplerKept()
                case SaveWeights():
                    outcome = self._save(model, operation)
                case Skip():
                    outcome = EngineFailure(
                        message="the request failed before and is not tried again", blame=Blame.USER
                    )
        except Exception as e:
            outcome = self._failure(e, model)
        if outcome is not None:
            self._finish(model, outcome, time.perf_counter() - start)

    def _create(self, model: QueuedModel, operation: CreateModel) -> TrainOutcome:
        if model.weights is not None:
            raise AdapterError(f"model {model.model_id!r} already exists")
        if len(self.table.models) > self.max_models:
            message = f"this worker holds {self.max_models} models, which is the limit; unload one first"
            return EngineFailure(message=message, blame=Blame.SERVER)
        try:
            name_of(model.model_id)
        except ValueError as e:
            raise DataError(str(e)) from None
        weights = self.backend.create(operation.lora)
        if operation.load_from is not None:
            try:
                self.backend.load(weights, self._find(operation.load_from), optimizer=operation.load_optimizer)
            except BaseException:
                self.backend.free(weights)
                raise
        model.weights, model.snapshot_at = weights, time.monotonic()
        return Created()

    def _find(self, folder: str) -> str:
        return str(self.checkpoints.find(folder))

    def _save(self, model: QueuedModel, operation: SaveWeights) -> TrainOutcome | None:
        """The files are written elsewhere, from a copy; this model's next request waits for them."""
        folder = Path(operation.folder)
        if (size := self.checkpoints.saved_bytes(folder)) is not None:
            return Saved(size_bytes=size)
        write = self.backend.writer(model.weights, optimizer=operation.optimizer)
        start = time.perf_counter()

        def then(size: int, error: Exception | None) -> None:
            if model.is_dropped:
                return
            if error is None:
                outcome: TrainOutcome = Saved(size_bytes=size)
            else:
                self._failure(error, model)  # for the log
                outcome = EngineFailure(message=f"{folder} could not be written: {error}", blame=Blame.SERVER)
            self._finish(model, outcome, time.perf_counter() - start)

        model.is_saving = True
        self.table.make_ready(model)
        self.checkpoints.save(folder, write, then)
        return None

    # Steps

    def _optim_step(self) -> None:
        start = time.perf_counter()
        due = {}
        for model in self.table.ready:
            operation = model.requests[0].operation
            if isinstance(operation, OptimStep) and model.weights is not None:
                due[model] = operation.adam
        outcomes = self.backend.optim_step({model.weights: adam for model, adam in due.items()})
        self.sampler_cache.may_have_grown = True  # what was kept of the old weights has its own memory now
        share = (time.perf_counter() - start) / len(due)
        for model in due:
            outcome = outcomes[model.weights]
            if isinstance(outcome, Exception):
                self._finish(model, self._failure(outcome, model), share)
            else:
                self.counters.optim_steps += 1
                self._finish(model, StepDone(metrics=outcome), share)

    # Passes

    def _forward(self, first: QueuedModel) -> None:
        start = time.perf_counter()
        parts = self._join(first)
        if not parts:
            return
        for part in parts:  # their next turn comes after that of their owner's other models
            self.table.ready.served(part.model.owner, part.model.model_id)
        train = parts[0].running.train
        try:
            forward = self.backend.forward([p.batch for p in parts], train=train)
        except Exception as e:
            self._fall_back(parts, e)
            return
        self._charge(parts, start)
        self.counters.count_batch(len(parts), sum(p.batch.tokens for p in parts))
        joined = Joined(parts, forward)
        if train:
            self._half_done = joined
        else:
            self._settle(joined)

    def _backward(self) -> None:
        joined, self._half_done = self._half_done, None
        assert joined is not None
        start = time.perf_counter()
        try:
            self.backend.backward(joined.forward)
        except Exception as e:
            self._fall_back(joined.parts, e)
            return
        self._charge(joined.parts, start)
        self._settle(joined)

    def _join(self, first: QueuedModel) -> list[BatchPart]:
        """Returns for each rank the next micro-batch of `first`, and of other models where there is room: never two of
        one model."""
        parts: list[BatchPart] = []
        room = [self.backend.token_budget] * self.backend.ranks
        for model in [first, *(m for m in self.table.ready if m is not first)]:
            if max(room) <= 0:
                break
            running = self._begun(model)
            if running is None or (parts and (running.train != parts[0].running.train or running.alone)):
                continue
            for rank, todo in enumerate(running.todo):
                neighbour = next((part.batch for part in parts if part.batch.rank == rank), None)
                if not todo or (
                    neighbour is not None and (todo[0].tokens > room[rank] or todo[0].width != neighbour.width)
                ):
                    continue
                room[rank] -= todo[0].tokens
                parts.append(BatchPart(model, running, todo.popleft()))
            if running.alone:
                break
        return parts

    def _begun(self, model: QueuedModel) -> RunningPass | None:
        """The pass at the head of a model's queue, planned; None if there is none (any more)."""
        operation = model.requests[0].operation
        if not isinstance(operation, Pass) or model.weights is None:
            return None
        if model.running is None:
            try:
                if not operation.data:
                    raise DataError("the request has no data; send at least one datum")
                plan = self.backend.plan(model.weights, operation)
                begun = None if operation.forward_only else self.backend.begin_pass(model.weights)
            except Exception as e:
                self._finish(model, self._failure(e, model), 0.0)
                return None
            todo = [deque(part for part in plan if part.rank == rank) for rank in range(self.backend.ranks)]
            budget = self.backend.token_budget
            model.running = RunningPass(not operation.forward_only, len(operation.data), todo, budget, begun)
        return model.running

    def _settle(self, joined: Joined) -> None:
        for part, results in zip(joined.parts, joined.forward.results, strict=True):
            if not part.is_current:
                continue
            part.running.results.update(zip(part.batch.numbers, results, strict=True))
            if len(part.running.results) == part.running.size:
                try:
                    if part.running.train:
                        self.backend.end_pass(part.model.weights, part.running.begun)
                except Exception as e:
                    self._fall_back([part], e)
                    continue
                done = [part.running.results[i] for i in range(len(part.running.results))]
                metrics = combine_metrics([d.metrics for d in done]) | router_metrics([d.visits for d in done])
                outcome = PassResult(outputs=[d.output for d in done], metrics=metrics)
                self._finish(part.model, outcome, part.running.compute_s)

    def _fall_back(self, parts: list[BatchPart], error: Exception) -> None:
        """Gradients go back to where the passes began. One that was alone fails, unless memory was short and can be
        saved; others begin again, each alone."""
        raise_if_broken(self.backend, error)
        saved = self.backend.save_memory(error)
        if saved is not None:
            log.warning("out_of_memory tokens=%d now=%s", sum(p.batch.tokens for p in parts), saved)
        for part in parts:
            if not part.is_current:
                continue
            if part.running.train:
                self.backend.undo_pass(part.model.weights, part.running.begun)
            # planned before the budget was cut: plan anew
            is_outdated = part.running.budget > self.backend.token_budget and len(part.batch.numbers) > 1
            if len(parts) == 1 and saved is None and not is_outdated:
                self._finish(part.model, self._failure(error, part.model), part.running.compute_s)
            else:
                part.model.running = None
                again = self._begun(part.model)
                if again is not None:
                    again.alone, again.compute_s = True, part.running.compute_s

    def _charge(self, parts: list[BatchPart], start: float) -> None:
        per_token = (time.perf_counter() - start) / sum(p.batch.tokens for p in parts)
        for part in parts:
            part.running.compute_s += per_token * part.batch.tokens

    # Ends

    def _finish(self, model: QueuedModel, outcome: TrainOutcome, compute_s: float) -> None:
        self.table.finish(model, outcome, compute_s)
        self._on_applied(model)

    def _failure(self, error: Exception, model: QueuedModel) -> EngineFailure:
        raise_if_broken(self.backend, error)
        request = model.requests[0]
        return failure_of(error, f"{type(request.operation).__name__} model={model.model_id} seq={request.seq_id}")
