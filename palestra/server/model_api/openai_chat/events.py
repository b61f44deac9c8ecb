"""The result of a chat call of any route: an answer, or events that end with one.

Chat completions, Responses and Messages write these in three formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from palestra.chat import ChatTokenizer
from palestra.chat.output_parser import ContentPiece, ReasoningPiece
from palestra.store.queries.traces import TurnKey
from palestra.types.sampling import SampledSequence, SampleResult, TopLogprobs


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """The arguments as JSON."""


class ChatFinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token as it is shown to the client."""

    token: int
    logprob: float
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ChatChoice:
    index: int
    reasoning: str | None
    content: str | None
    """None: there was nothing but calls."""
    calls: Sequence[ToolCall]
    finish: ChatFinishReason
    stop: str | int | None
    """What ended it, if it was part of the request: a stop string or a token's id; None for the model's own end of
    turn."""
    sequence: SampledSequence
    """The sequence as it was sampled; its logprobs are at the temperature."""
    tokens: Sequence[SampledToken]
    pieces: Sequence[ReasoningPiece | ContentPiece | ToolCall] = ()
    """The same as reasoning, content and calls, in the order they were written."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    response_id: str
    turn: TurnKey
    """Where it is stored."""
    model: str
    """The name of the model as the client gave it."""
    prompt: Sequence[int]
    choices: Sequence[ChatChoice]
    usage: TokenUsage
    result: SampleResult
    """The engine's whole result."""
    tokenizer: ChatTokenizer

    @property
    def trace_id(self) -> str:
        return self.turn.trace_id


@dataclass(frozen=True, slots=True)
class StreamStarted:
    """Always the first event: from here on nothing can be refused."""

    prompt: Sequence[int]
    tokenizer: ChatTokenizer


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new in one choice. Pieces are in their order; there may be tokens without a piece yet."""

    choice: int
    pieces: Sequence[ReasoningPiece | ContentPiece | ToolCall]
    tokens: Sequence[SampledToken]


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """Always the last event: its turn is on disk. The deltas of a choice, joined, equal the choice in the answer."""

    answer: ChatAnswer


ChatEvent = StreamStarted | ChoiceDelta | StreamEnded
