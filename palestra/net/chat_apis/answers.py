"""Answers to chat calls, whole or in pieces, and what an API has to say about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field

from palestra.types import StopReason
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject


class NotAnAnswer(Exception):
    """The body is not in the form of the API."""


class CallAnswer(Struct):
    message: Message
    stop: StopReason
    prompt_tokens: int
    sampled_tokens: int
    seconds: float = 0.0
    """Duration of the try that was answered: waiting for an absent server or trainer does not count against the
    episode."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sampled_tokens

    @property
    def text(self) -> str:
        return self.message.get("content") or ""


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float


class AnswerPiece(Struct, frozen=True):
    """A part of a streamed answer; what it does not bring is empty."""

    text: str = ""
    reasoning: str = ""
    tokens: tuple[TokenLogprob, ...] = ()
    stop: StopReason | None = None
    prompt_tokens: int = 0
    sampled_tokens: int = 0


class StreamedAnswer(Struct):
    """The part of an answer that has come so far."""

    text: str = ""
    reasoning: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)
    stop: StopReason | None = None
    """None: the answer has not ended, or was stopped on the way."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0

    def add(self, piece: AnswerPiece) -> None:
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.tokens += piece.tokens
        self.stop = piece.stop or self.stop
        self.prompt_tokens = piece.prompt_tokens or self.prompt_tokens
        self.sampled_tokens = piece.sampled_tokens or self.sampled_tokens

    @property
    def message(self) -> Message:
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **reasoning}


class ChatApi(Protocol):
    """The calls of an endpoint."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str:
        """Path of a call after the endpoint's address, which ends with /v1."""
        ...

    @property
    def has_logprobs(self) -> bool: ...

    def headers(self, key: str) -> dict[str, str]: ...

    def body(self, model: str, messages: Sequence[Message], options: Mapping[str, object]) -> JsonObject:
        """The request. `options` have OpenAI's names; one that the API does not know is left out."""
        ...

    def answer(self, body: JsonMapping) -> CallAnswer:
        """Reads a whole answer. Raises NotAnAnswer."""
        ...

    def piece(self, event: JsonMapping) -> AnswerPiece:
        """Reads an event of a stream. Raises NotAnAnswer."""
        ...
