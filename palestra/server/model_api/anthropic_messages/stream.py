"""Writes an answer as a stream of Anthropic's events; together they are the Message that a plain call gets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence

from palestra.chat.output_parser import ContentPiece, ReasoningPiece
from palestra.net.chat_apis import anthropic_format as anthropic
from palestra.server.model_api.anthropic_messages import response_body as answers
from palestra.server.model_api.anthropic_messages.errors import AnthropicErrorBody, refusal
from palestra.server.model_api.anthropic_messages.response_body import Piece, is_silent, signature
from palestra.server.model_api.anthropic_messages.schemas import MessagesRequest
from palestra.server.model_api.errors import as_refusal
from palestra.server.model_api.openai_chat.events import (
    ChatAnswer,
    ChatEvent,
    ChoiceDelta,
    StreamEnded,
    StreamStarted,
    TokenUsage,
    ToolCall,
)
from palestra.server.model_api.sse import event
from palestra.types.anthropic import MessageBlock, MessageEvent


async def lines(
    events: AsyncGenerator[ChatEvent, None], call: MessagesRequest, message_id: str
) -> AsyncGenerator[bytes, None]:
    """Yields events. A refusal before the first of them is raised; afterwards it is an event."""
    writer, has_begun = _Writer(call, message_id), False
    try:
        async for one in events:
            has_begun = True
            if chunk := b"".join(map(_line, writer.write(one))):
                yield chunk
    except Exception as error:
        if not has_begun:
            raise
        yield failed(error)
    finally:
        await events.aclose()


def failed(error: Exception) -> bytes:
    """Returns the event of an error after the stream has begun."""
    return _line(refusal(as_refusal(error)))


def _line(written: MessageEvent | AnthropicErrorBody) -> bytes:
    return event(written, written["type"])


PING_LINE = _line(anthropic.PING)


class _Writer:
    """Writes the events of one message."""

    def __init__(self, call: MessagesRequest, message_id: str):
        self._call, self._message_id = call, message_id
        self._index = 0
        """Index of the block that is open, or comes next."""
        self._open: type[ReasoningPiece] | type[ContentPiece] | None = None
        self._thought = ""

    def write(self, event: ChatEvent) -> Iterator[MessageEvent]:
        match event:
            case StreamStarted(prompt=prompt):
                yield from self._begin(prompt)
            case ChoiceDelta(pieces=pieces):
                for piece in pieces:
                    yield from self._say(piece)
            case StreamEnded(answer=answer):
                yield from self._end(answer)

    def _begin(self, prompt: Sequence[int]) -> Iterator[MessageEvent]:
        """Begins the message. How much of the prompt was cached is not known yet."""
        used = TokenUsage(prompt_tokens=len(prompt), completion_tokens=0, cached_tokens=0, reasoning_tokens=0)
        message: dict[str, object] = {
            **anthropic.new_message(self._message_id, self._call.model),
            "usage": answers.usage(used),
        }
        if self._call.return_token_ids:
            message["prompt_token_ids"] = list(prompt)
        yield anthropic.message_start(message)
        yield anthropic.PING

    def _say(self, piece: Piece) -> Iterator[MessageEvent]:
        if is_silent(piece):
            return
        if self._open is not None and not isinstance(piece, self._open):
            yield from self._close()
        if isinstance(piece, ToolCall):
            yield self._started(anthropic.tool_use(piece.id, piece.name, {}))
            yield anthropic.block_delta(self._index, "tool_use", piece.arguments)
            yield from self._close()
        elif isinstance(piece, ContentPiece):
            if self._open is None:
                yield self._started({"type": "text", "text": ""}, ContentPiece)
            yield anthropic.block_delta(self._index, "text", piece.text)
        else:
            if self._open is None:
                yield self._started({"type": "thinking", "thinking": "", "signature": ""}, ReasoningPiece)
            self._thought += piece.text
            if self._call.shows_thinking:
                yield anthropic.block_delta(self._index, "thinking", piece.text)

    def _end(self, answer: ChatAnswer) -> Iterator[MessageEvent]:
        if self._open is not None:
            yield from self._close()
        ended = anthropic.message_delta(answers.ended(answer.choices[0]), answers.usage(answer.usage))
        yield {**ended, **answers.extras(answer, self._call)}
        yield anthropic.MESSAGE_STOP

    def _started(
        self, block: MessageBlock, kind: type[ReasoningPiece] | type[ContentPiece] | None = None
    ) -> MessageEvent:
        self._open = kind
        return anthropic.block_start(self._index, block)

    def _close(self) -> Iterator[MessageEvent]:
        if self._open is ReasoningPiece:
            yield anthropic.block_delta(self._index, "signature", signature(self._thought))
            self._thought = ""
        yield anthropic.block_stop(self._index)
        self._open, self._index = None, self._index + 1
