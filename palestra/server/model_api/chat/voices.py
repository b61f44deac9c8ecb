"""A choice of a chat while it is being said: tokens in, pieces out, and in the end the whole of it.

Owns: names of tool calls, what a choice says in the end. Never touches: the engine, traces, wires.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence

from palestra.chat.decoding import Decoding
from palestra.chat.speech import Called, Piece, Said, SpeechParser, Thought, put_together
from palestra.chat.tool_calls import ParsedCall
from palestra.chat.tool_formats import ToolFormat
from palestra.server.model_api.chat.events import Choice, DrawnToken, Finish, ToolCall
from palestra.server.model_api.chat.hearing import Hearing
from palestra.server.model_api.chat.plans import Plan
from palestra.types.engine import StreamedTokens
from palestra.types.sampling import SampledSequence, StopReason

Told = Thought | Said | ToolCall

LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # the templates of Mistral's models refuse all others


class Voice:
    def __init__(self, plan: Plan, tools: ToolFormat | None, *, in_thought: bool):
        call = plan.origin.call
        self._hearing = Hearing(
            Decoding(plan.tokenizer, keep_special=call.skip_special_tokens is False),
            plan.request.params,
            shows_stop=bool(call.include_stop_str_in_output),
        )
        self._parser = SpeechParser(tools, in_thought=in_thought)
        self._asked_stops = call.stop_token_ids or ()
        self._parsed: list[Piece] = []
        self._pieces: list[Told] = []

    def hear(self, tokens: Sequence[int]) -> list[Told]:
        return self._told(self._parser.feed(self._hearing.hear(tokens)))

    def finish(self) -> list[Told]:
        last = self._told(self._parser.feed(self._hearing.finish()))
        return last + self._told(self._parser.finish())

    def choice(self, index: int, sequence: SampledSequence) -> Choice:
        speech, stop = put_together(self._parsed), self._hearing.stop
        calls = [piece for piece in self._pieces if isinstance(piece, ToolCall)]
        finish = Finish.TOOL_CALLS if calls else Finish.STOP
        return Choice(
            index=index,
            reasoning=speech.reasoning,
            content=None if calls and not speech.content else speech.content,
            calls=calls,
            finish=Finish.LENGTH if sequence.stop_reason is StopReason.LENGTH else finish,
            stop=stop if isinstance(stop, str) or stop in self._asked_stops else None,
            sequence=sequence,
            tokens=drawn_tokens(sequence),
            pieces=self._pieces,
        )

    def _told(self, pieces: Sequence[Piece]) -> list[Told]:
        self._parsed += pieces
        told = [_named(piece.call) if isinstance(piece, Called) else piece for piece in pieces]
        self._pieces += told
        return told


def _named(call: ParsedCall) -> ToolCall:
    name = "".join(secrets.choice(LETTERS) for _ in range(ID_LENGTH))
    return ToolCall(name, call.name, json.dumps(call.arguments, ensure_ascii=False))


def streamed_tokens(part: StreamedTokens) -> list[DrawnToken]:
    top = part.topk_logprobs or [None] * len(part.tokens)
    return [DrawnToken(*one) for one in zip(part.tokens, part.logprobs, top, strict=True)]


def drawn_tokens(sequence: SampledSequence) -> list[DrawnToken]:
    logprobs = sequence.raw_logprobs or sequence.logprobs
    top = sequence.topk_logprobs or [None] * len(logprobs)
    return [DrawnToken(*one) for one in zip(sequence.tokens, logprobs, top, strict=True)]
