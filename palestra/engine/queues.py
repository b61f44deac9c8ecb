"""Models and their requests: each applied once, in order; results kept until the server has them on disk.

Owns: who waits for what, the numbers, unstored results. Never touches: computing, files.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from palestra.engine.backend import DatumDone, MicroBatch, Weights
from palestra.engine.files import FileDamaged
from palestra.model.errors import ModelError
from palestra.types import LoraConfig
from palestra.types.engine import (
    Blame,
    CreateModel,
    EngineFailure,
    FromWorker,
    ModelState,
    Train,
    Trained,
    TrainOutcome,
)
from palestra.util.round_robin import RoundRobin

log = logging.getLogger(__name__)

KEPT_SNAPSHOTS = 2  # of each model: if the newest is damaged, the other one serves
NO_SNAPSHOT = -1


@dataclass(slots=True)
class RunningPass:
    """A pass between its first micro-batch and its result."""

    train: bool
    size: int
    """Number of its data."""
    todo: list[deque[MicroBatch]]
    """What each rank has still to compute."""
    budget: int
    """Tokens of a micro-batch when it was planned."""
    begun: object = None
    """What the backend needs to end or to undo the pass; None for one that does not train."""
    results: dict[int, DatumDone] = field(default_factory=dict)
    """By the number of the datum."""
    compute_s: float = 0.0
    alone: bool = False
    """Run it alone: a joint batch with it has failed."""


@dataclass(slots=True, eq=False)
class QueuedModel:
    model_id: str
    lora: LoraConfig
    weights: Weights | None = None
    """None before it is created, or when that failed."""
    owner: str = ""
    """Whose it is: owners take turns, and each owner's models among themselves."""
    requests: deque[Train] = field(default_factory=deque)
    running: RunningPass | None = None
    """The pass of the first request, while it runs."""
    is_saving: bool = False
    """The first request waits for the file thread."""
    is_dropped: bool = False
    received_seq: int = -1
    applied_seq: int = -1
    snapshots: list[int] = field(default_factory=lambda: [NO_SNAPSHOT] * KEPT_SNAPSHOTS)
    """The last request that each snapshot on disk has."""
    copies: list[int] = field(default_factory=list)
    """The same of their copies at the server, where the worker is on another machine; else empty."""
    snapshot_at: float = field(default_factory=time.monotonic)
    """When the last one was begun; at first, when there was nothing to keep yet."""
    is_snapshotting: bool = False
    bytes_since_snapshot: int = 0
    snapshot_write_s: float = 0.0
    """Seconds that writing the last one took."""

    @property
    def covered_seq(self) -> int:
        """Every snapshot on disk has everything up to here: a replay never needs it."""
        return min(self.snapshots)

    @property
    def settled_seq(self) -> int:
        """The server's journal is not needed up to here, whatever is lost."""
        return min(self.copies + self.snapshots)

    @property
    def is_changed(self) -> bool:
        """Whether the model has changed since the newest snapshot."""
        return self.weights is not None and self.applied_seq > max(self.snapshots)

    @property
    def needs_snapshot(self) -> bool:
        """A model at rest is written once more: its requests leave the journal when each of the snapshots has them."""
        return self.weights is not None and self.applied_seq > self.covered_seq

    @property
    def is_between_requests(self) -> bool:
        return self.running is None and not self.is_saving


class ModelTable:
    def __init__(self, send: Callable[[FromWorker], None]):
        self.models: dict[str, QueuedModel] = {}
        self.ready: RoundRobin[QueuedModel] = RoundRobin()
        """Those with something to compute."""
        self.owners: dict[str, str] = {}
        """By model, also those that are about to be created."""
        self.unstored: dict[str, Trained] = {}
        self.queued = 0
        self.copies_of_new: Callable[[], list[int]] = list
        """`QueuedModel.copies` of a new model."""
        self._send = send

    def accept(self, train: Train, size_bytes: int) -> None:
        model = self.models.get(train.model_id)
        if model is None:
            if not isinstance(train.operation, CreateModel):
                self._answer(train, no_model(train.model_id), 0.0)
                return
            model = self.models[train.model_id] = QueuedModel(
                train.model_id,
                train.operation.lora,
                owner=self.owners.get(train.model_id, ""),
                copies=self.copies_of_new(),
            )
        if train.seq_id <= model.received_seq:
            self._repeat(train)
            return
        model.received_seq = train.seq_id
        model.bytes_since_snapshot += size_bytes
        model.requests.append(train)
        self.queued += 1
        self.make_ready(model)

    def finish(self, model: QueuedModel, outcome: TrainOutcome, compute_s: float) -> None:
        """The first request of a model is done, one way or the other."""
        train = model.requests.popleft()
        model.running, model.is_saving, model.applied_seq = None, False, train.seq_id
        self.queued -= 1
        self._answer(train, outcome, compute_s)
        self.ready.served(model.owner, model.model_id)
        self.make_ready(model)

    def make_ready(self, model: QueuedModel) -> None:
        """Puts the model in line if there is something to compute for it."""
        if model.requests and not model.is_saving and not model.is_dropped:
            self.ready.add(model.owner, model.model_id, model)
        else:
            self.ready.remove(model.owner, model.model_id)

    def next(self) -> QueuedModel:
        """The model whose turn it is; its owner has had one now."""
        owner, _, model = self.ready.first()
        self.ready.owner_served(owner)
        return model

    def set_owner(self, model_id: str, owner: str) -> None:
        self.owners[model_id] = owner
        model = self.models.get(model_id)
        if model is not None:
            self.ready.remove(model.owner, model_id)
            model.owner = owner
            self.make_ready(model)

    def drop(self, model_id: str) -> QueuedModel | None:
        self.owners.pop(model_id, None)
        model = self.models.pop(model_id, None)
        if model is not None:
            self.ready.remove(model.owner, model_id)
            self.queued -= len(model.requests)
            model.is_dropped = True
            model.requests.clear()
        return model

    def stored(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            result = self.unstored.pop(request_id, None)
            model = self.models.get(result.model_id) if result is not None else None
            if model is not None and model.weights is None and not model.requests:
                self.drop(model.model_id)  # it could not be created, and its clients know

    def unstored_of(self, model: QueuedModel) -> list[Trained]:
        return [r for r in self.unstored.values() if r.model_id == model.model_id and r.seq_id <= model.applied_seq]

    def states(self) -> list[ModelState]:
        return [
            ModelState(
                model_id=m.model_id,
                received_seq=m.received_seq,
                applied_seq=m.applied_seq,
                covered_seq=m.settled_seq,
            )
            for m in self.models.values()
        ]

    def _answer(self, train: Train, outcome: TrainOutcome, compute_s: float) -> None:
        result = Trained(
            request_id=train.request_id,
            model_id=train.model_id,
            seq_id=train.seq_id,
            outcome=outcome,
            compute_s=compute_s,
        )
        self.unstored[train.request_id] = result
        self._send(result)

    def _repeat(self, train: Train) -> None:
        """Received before: it is queued, or its result waits to be stored, or the server has that already."""
        for result in self.unstored.values():
            if (result.model_id, result.seq_id) == (train.model_id, train.seq_id):
                self._send(result)


def no_model(model_id: str) -> EngineFailure:
    return EngineFailure(
        message=f"model {model_id!r} is not loaded here: it was unloaded, or could not be created; create it again",
        blame=Blame.USER,
    )


def failure_of(error: Exception, where: str) -> EngineFailure:
    """Returns a caller's mistake as it is; logs our own with its trace."""
    if isinstance(error, ModelError):
        return EngineFailure(message=str(error), blame=Blame.USER)
    log.error("failed where=%s", where, exc_info=error)
    if isinstance(error, FileDamaged):
        return EngineFailure(message=str(error), blame=Blame.SERVER)
    if isinstance(error, OSError):
        return EngineFailure(message=f"a file could not be read or written: {error}", blame=Blame.SERVER)
    return EngineFailure(message=f"the engine failed: {type(error).__name__}: {error}", blame=Blame.SERVER)
