"""Records of requests that are sampled, and of what a step of the sampler returns.

Owns: these records. Never touches: the decoder, scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct
from torch import Tensor

from palestra.model.lora.adapters import Adapter
from palestra.model.sampling.logit_filters import DrawRow, TokenMask
from palestra.model.sampling.prompt_logprobs import PromptScores
from palestra.model.sampling.sequences import Sequence
from palestra.model.sampling.token_draws import DeviceDraws
from palestra.types import SampleRequest, SampleResult, StopReason, TopLogprobs
from palestra.types.sampling import WeightsChange


class TokenEvent(Struct, frozen=True, gc=False):
    """A token as it was drawn, for streams."""

    request_id: int
    sample: int
    token: int
    logprob: float
    """The raw one, where the request asked for those."""
    top: TopLogprobs | None
    is_first: bool
    """Whether it is the first token of its sequence."""


@dataclass(slots=True, frozen=True)
class Finished:
    """A request that has all of its sequences."""

    request_id: int
    result: SampleResult


@dataclass(slots=True, frozen=True)
class Failed:
    """A request that ended with an error, its own mask's or that of the step it was in: the others go on."""

    request_id: int
    error: Exception


@dataclass(slots=True)
class StepOutput:
    """What one step of the sampler brought: tokens drawn, and the requests that ended."""

    tokens: list[TokenEvent] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One sequence of a request."""

    request: RunningRequest
    index: int
    seq: Sequence
    draw: DrawRow
    mask: TokenMask | None = None
    logprobs: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    routing: Tensor | None = None
    """Experts of its positions, read when it gave back its pages; None if they are not recorded, or it had none."""
    stop_reason: StopReason | None = None
    changes: list[WeightsChange] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SharedWeights:
    """A snapshot that the requests for the same weights share."""

    adapter: Adapter
    requests: int = 0


class PendingChange(Struct, frozen=True):
    """Other weights for a request, from the next step on."""

    request_id: int
    weights: SharedWeights
    name: str
    keeps_keys: bool


@dataclass(slots=True, eq=False)
class RunningRequest:
    id: int
    spec: SampleRequest
    weights: SharedWeights | None
    """A snapshot: training goes on meanwhile, and this request does not notice unless its weights are changed."""
    stop_ids: tuple[int, ...]
    scores: PromptScores | None
    samples: list[RunningSequence] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class UnreadTokens:
    """Tokens that were drawn, but not read."""

    draws: list[tuple[list[RunningSequence], DeviceDraws]]
    places: dict[int, int]
    """Index into `tokens` by the sequence's uid."""
    tokens: Tensor
