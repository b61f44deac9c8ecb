"""Calls of rank 0 to its followers, and their answers: one msgpack record a message.

Models are numbered by rank 0. Tensors do not travel here: where a call says so, all ranks meet in torch.distributed.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from palestra.model.lora.adapters import Rows
from palestra.model.sampling.planned_step import PlannedStep
from palestra.types import AdamParams, Datum, LoraConfig
from palestra.types.engine import DatumOutput


class PlaceModel(Struct, frozen=True, tag="place"):
    """Makes a model what it is at rank 0, which then broadcasts these rows of it."""

    model: int
    lora: LoraConfig
    steps: int
    rows: tuple[Rows, ...]


class FreeModel(Struct, frozen=True, tag="free"):
    model: int


class BeginPass(Struct, frozen=True, tag="begin"):
    model: int


class PartCall(Struct, frozen=True):
    """A micro-batch."""

    model: int
    gradient_shard: int
    loss: str
    config: dict[str, float]
    data: list[Datum]


class ForwardCall(Struct, frozen=True, tag="forward"):
    """Computes these parts as one batch; answered by `ForwardDone`. Without parts, a rank whose share of the base model
    others need computes nothing of use."""

    parts: list[PartCall]
    train: bool


class GatherCall(Struct, frozen=True, tag="gather"):
    """Rank 0 runs the layers for itself, and the base model lies across the ranks: all run them."""


class BackwardCall(Struct, frozen=True, tag="backward"):
    """Ends the last forward that trained."""


class EndPass(Struct, frozen=True, tag="end"):
    """Sums the gradients of a request over the ranks that computed parts of it; all ranks meet."""

    model: int
    ranks: list[int]
    """Numbers of groups, where several ranks share every layer or micro-batch."""


class UndoPass(Struct, frozen=True, tag="undo"):
    model: int


class StepCall(Struct, frozen=True, tag="step"):
    """An optimizer step; answered by `StepReply`."""

    steps: list[tuple[int, AdamParams]]


class OpenCache(Struct, frozen=True, tag="open_cache"):
    """The follower samples together with rank 0 and gets a KV cache of the same pages."""

    n_pages: int
    page_size: int


class PlaceWeights(Struct, frozen=True, tag="place_weights"):
    """Weights for sampling: those that a model has now, or, without one, those that rank 0 broadcasts."""

    weights_id: int
    lora: LoraConfig
    model: int | None


class DropWeights(Struct, frozen=True, tag="drop_weights"):
    weights_ids: list[int]


class SampleCall(Struct, frozen=True, tag="sample"):
    """Runs the layers in a step of rank 0's sampler, which broadcasts the tokens."""

    step: PlannedStep
    adapters: list[tuple[int | None, int]]
    """The `weights_id` of each run of rows, and how many there are."""


class Quit(Struct, frozen=True, tag="quit"):
    pass


Call = (
    PlaceModel
    | FreeModel
    | BeginPass
    | ForwardCall
    | GatherCall
    | BackwardCall
    | EndPass
    | UndoPass
    | StepCall
    | OpenCache
    | PlaceWeights
    | DropWeights
    | SampleCall
    | Quit
)


class Ready(Struct, frozen=True, tag="ready"):
    """The follower has loaded the base model."""


class DatumReply(Struct, frozen=True, array_like=True):
    output: DatumOutput
    metrics: dict[str, float]
    visits: bytes | None = None
    """int64, little-endian, where the model has experts."""


class ForwardDone(Struct, frozen=True, tag="forward_done"):
    results: list[list[DatumReply]]


class StepReply(Struct, frozen=True, tag="step_reply"):
    norms: list[float | None]
    """The gradient's norm of each model, None where the step was refused: the same at every rank, or they differ."""


Reply = Ready | ForwardDone | StepReply

encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
