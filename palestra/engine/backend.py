"""The interface between the engine and the code that computes. The loop, the queues and the files know only this.

Owns: the protocol and the records that cross it. Never touches: tensors, requests, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from palestra.model import TokenEvent
from palestra.types import AdamParams, LoraConfig, SampleRequest, SampleResult
from palestra.types.engine import DatumOutput, ModelCard, Pass

Weights = Any
"""A backend's own handle: of a model in training, or of weights frozen for sampling."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of one pass, of one model."""

    numbers: list[int]
    """Which data of the pass."""
    tokens: int
    """Those that are computed: what its data share counts once."""
    width: int
    """Targets per position; only equal ones can be joined."""
    data: Any
    gradient_shard: int = 0
    """Where its gradient belongs in the sum of the request (model/training/gradient_tree)."""
    rank: int = 0
    """The rank that computes it."""


@dataclass(frozen=True, slots=True)
class DatumDone:
    output: DatumOutput
    metrics: dict[str, float]
    visits: NDArray[np.int64] | None = None
    """How often its tokens visited each expert, for models with experts."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Micro-batches of several models after their forward; with `pending` a backward must follow."""

    results: list[list[DatumDone]]
    """One list for each micro-batch."""
    pending: Any = None


@dataclass(frozen=True, slots=True)
class ModelImage:
    """All there is to a model, copied: `restore` goes on from it to the bit."""

    tensors: dict[str, NDArray[np.float32]]
    steps: int


@dataclass(slots=True)
class SampleStep:
    finished: list[tuple[int, SampleResult]] = field(default_factory=list)
    failed: list[tuple[int, Exception]] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BackendLoad:
    adapter_bytes: int
    running_samples: int
    waiting_samples: int
    kv_used: float
    cache_tokens: int


@dataclass(frozen=True, slots=True)
class AdapterCopy:
    """Frozen weights, copied to be sent to replicas."""

    lora: LoraConfig
    pack: Callable[[], bytes]
    """Makes the file, from any thread."""


class BackendBroken(Exception):
    """Nothing can be computed here any more: the process must end, the next one replays."""


class ComputeBackend(Protocol):
    """Calls come from one thread. A `ModelError` is the caller's fault, anything else is ours."""

    @property
    def card(self) -> ModelCard: ...
    @property
    def token_budget(self) -> int:
        """Tokens of a joined micro-batch. Fixed for the life of a state folder, or replay ends at other bits; only
        `save_memory` may lower it."""
        ...

    @property
    def ranks(self) -> int:
        """Processes that compute micro-batches at the same time."""
        ...

    @property
    def gradient_shards(self) -> int:
        """Sums of which a request's gradient is a tree. Fixed for the life of a state folder, too."""
        ...

    @property
    def tensor(self) -> int:
        """Processes that compute every layer together. Another number gives other bits."""
        ...

    @property
    def context(self) -> int:
        """Processes that compute every micro-batch together. Another number gives other bits, too."""
        ...

    @property
    def max_sample_rows(self) -> int:
        """Sequences of one sampling step."""
        ...

    # Models
    def create(self, lora: LoraConfig) -> Weights: ...
    def load(self, model: Weights, folder: str, *, optimizer: bool) -> None:
        """Replaces weights and training state, or raises and changes nothing."""
        ...

    def writer(self, model: Weights, *, optimizer: bool) -> Callable[[Path], None]:
        """Copies the model now; the result writes a checkpoint folder, from any thread."""
        ...

    def image(self, model: Weights) -> ModelImage: ...
    def restore(self, lora: LoraConfig, image: ModelImage) -> Weights: ...
    def free(self, weights: Weights) -> None:
        """A model or frozen weights. Samples that use them are not disturbed."""
        ...

    # Training
    def plan(self, model: Weights, request: Pass) -> list[MicroBatch]:
        """Plans micro-batches from this request alone: a lone tenant's bits depend on it."""
        ...

    def forward(self, parts: Sequence[MicroBatch], *, train: bool) -> Forward: ...
    def backward(self, forward: Forward) -> None: ...
    def begin_pass(self, model: Weights) -> Any:
        """Begins a request that trains, before its first micro-batch; `end_pass` or `undo_pass` gets what it
        returns."""
        ...

    def end_pass(self, model: Weights, begun: Any) -> None:
        """Adds the request's gradient to what was accumulated before, after its last backward pass."""
        ...

    def undo_pass(self, model: Weights, begun: Any) -> None:
        """Restores what was accumulated before the request."""
        ...

    def optim_step(self, steps: Mapping[Weights, AdamParams]) -> dict[Weights, dict[str, float] | Exception]:
        """Each model its own outcome: metrics, or why nothing changed. Never raises."""
        ...

    # Weights for sampling
    def freeze(self, model: Weights) -> Weights:
        """Today's weights; free of cost until the model changes."""
        ...

    def frozen_row(self, frozen: Weights) -> NDArray[np.float32]: ...
    def place_row(self, lora: LoraConfig, row: NDArray[np.float32]) -> Weights: ...
    def open_folder(self, folder: str) -> Weights: ...
    def copy_adapter(self, frozen: Weights) -> AdapterCopy: ...
    def weights_key(self, weights: Weights) -> int:
        """Equal keys, equal weights, and the memory counts once."""
        ...

    def own_bytes(self, frozen: Weights) -> int:
        """0 while it shares its model's memory."""
        ...

    # Sampling
    def submit(self, request: SampleRequest, frozen: Weights | None) -> int: ...
    def change_weights(self, number: int, frozen: Weights, name: str, *, keeps_keys: bool) -> bool:
        """Changes the weights from the next step on; False if this request keeps those that it has."""
        ...

    def abort(self, number: int) -> None: ...
    def sample_step(self) -> SampleStep: ...

    def load_now(self) -> BackendLoad: ...
    def save_memory(self, error: Exception) -> str | None:
        """Saves memory after a training pass that ran out of it. Returns what was changed so that it may be tried
        again, or None where nothing more can be done, or something else went wrong."""
        ...

    def is_broken(self, error: BaseException) -> bool:
        """Whether nothing can be computed in this process any more."""
        ...

    def close(self) -> None:
        """Ends the processes that it started."""
        ...


def raise_if_broken(backend: ComputeBackend, error: Exception) -> None:
    """Raises BackendBroken before a failure is answered: a request is not to blame for a dead device."""
    if backend.is_broken(error):
        raise BackendBroken(str(error)) from error
