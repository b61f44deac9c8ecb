"""One choice of a chat while it is generated: takes tokens, returns pieces, and in the end the whole choice."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence

from palestra.chat.detokenizer import IncrementalDecoder
from palestra.chat.output_pieces import ContentPiece, Piece, ReasoningPiece, ToolCallPiece, put_together
from palestra.chat.tool_calls import ParsedCall
from palestra.chat.tool_parsers import OutputParser
from palestra.server.model_api.openai_chat.events import ChatChoice, ChatFinishReason, SampledToken, ToolCall
from palestra.server.model_api.openai_chat.sampling_plan import SamplingPlan
from palestra.server.model_api.openai_chat.stop_detokenizer import Detokenizer
from palestra.types.engine import StreamedTokens
from palestra.types.sampling import SampledSequence, StopReason

ChoicePiece = ReasoningPiece | ContentPiece | ToolCall

LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # the templates of Mistral's models refuse all other lengths


class ChoiceStream:
    def __init__(self, plan: SamplingPlan, parser: OutputParser):
        call = plan.origin.call
        self._detokenizer = Detokenizer(
            IncrementalDecoder(plan.tokenizer, keep_special=call.skip_special_tokens is False),
            plan.request.params,
            shows_stop=bool(call.include_stop_str_in_output),
        )
        self._parser = parser
        self._requested_stops = call.stop_token_ids or ()
        self._parsed: list[Piece] = []
        self._pieces: list[ChoicePiece] = []

    def feed(self, tokens: Sequence[int]) -> list[ChoicePiece]:
        return self._emitted(self._parser.feed(self._detokenizer.feed(tokens)))

    def finish(self) -> list[ChoicePiece]:
        last = self._emitted(self._parser.feed(self._detokenizer.finish()))
        return last + self._emitted(self._parser.finish())

    def choice(self, index: int, sequence: SampledSequence) -> ChatChoice:
        output, stop = put_together(self._parsed), self._detokenizer.stop
        calls = [piece for piece in self._pieces if isinstance(piece, ToolCall)]
        finish = ChatFinishReason.TOOL_CALLS if calls else ChatFinishReason.STOP
        return ChatChoice(
            index=index,
            reasoning=output.reasoning,
            content=None if calls and not output.content else output.content,
            calls=calls,
            finish=ChatFinishReason.LENGTH if sequence.stop_reason is StopReason.LENGTH else finish,
            stop=stop if isinstance(stop, str) or stop in self._requested_stops else None,
            sequence=sequence,
            tokens=drawn_tokens(sequence),
            pieces=self._pieces,
        )

    def _emitted(self, pieces: Sequence[Piece]) -> list[ChoicePiece]:
        self._parsed += pieces
        emitted = [_named(piece.call) if isinstance(piece, ToolCallPiece) else piece for piece in pieces]
        self._pieces += emitted
        return emitted


def _named(call: ParsedCall) -> ToolCall:
    name = "".join(secrets.choice(LETTERS) for _ in range(ID_LENGTH))
    return ToolCall(name, call.name, json.dumps(call.arguments, ensure_ascii=False))


def streamed_tokens(part: StreamedTokens) -> list[SampledToken]:
    top = part.topk_logprobs or [None] * len(part.tokens)
    return [SampledToken(*one) for one in zip(part.tokens, part.logprobs, top, strict=True)]


def drawn_tokens(sequence: SampledSequence) -> list[SampledToken]:
    logprobs = sequence.raw_logprobs or sequence.logprobs
    top = sequence.topk_logprobs or [None] * len(logprobs)
    return [SampledToken(*one) for one in zip(sequence.tokens, logprobs, top, strict=True)]
