"""`<|channel|>…<|message|>…<|end|>`: the messages of which gpt-oss composes an answer, each in a channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.chat.errors import ChatError
from palestra.chat.tool_parsers import lark
from palestra.chat.tool_parsers.harmony_parser import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    HarmonyParser,
    header_of,
)
from palestra.chat.tool_parsers.protocol import AnswerStart
from palestra.util.json_types import JsonMapping


class HarmonyFormat:
    name = "harmony"
    tags = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
    stops = (RETURN, CALL)

    def start(self, prompt_end: str) -> AnswerStart:
        header, found, body = prompt_end.rpartition(START)[2].partition(MESSAGE)
        if not found or END in body:
            return AnswerStart.FRESH
        return AnswerStart.IN_THOUGHT if header_of(header).is_thought else AnswerStart.IN_TEXT

    def parser(self, *, start: AnswerStart, reads_calls: bool) -> HarmonyParser:
        return HarmonyParser(start=start, reads_calls=reads_calls)

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        """Returns a grammar for one call: its last token ends the answer. It allows both places for the recipient, as
        templates and models write it."""
        channel, constrain, message = _tokens(special, CHANNEL, CONSTRAIN, MESSAGE)
        kind = f'("commentary json" | "commentary " {constrain} "json")'

        def one_call(name: str, arguments: str) -> str:
            to = lark.literal(f" to=functions.{name}")
            head = f'({to} {channel} {kind} | {channel} "commentary" {to} " " {constrain} "json")'
            return f"{head} {message} {arguments}"

        return lark.rules(["calls: calls_one"], tools, one_call)

    def layout(self, top: str, *, start: AnswerStart, special: Mapping[str, int]) -> str:
        channel, message, end, begin = _tokens(special, CHANNEL, MESSAGE, END, START)
        thoughts = {
            AnswerStart.FRESH: f'({channel} "analysis" {message} next)?',
            AnswerStart.IN_THOUGHT: "next",
            AnswerStart.IN_TEXT: "",
        }[start]
        final = f'{channel} "final" {message}'
        if start is AnswerStart.IN_TEXT:
            parts = {"calls": "next calls", "@answer": "@answer", "text_or_calls": "text? | next calls"}
        else:
            free = f'{final} text? | ({channel} "commentary" {message} next)? calls'
            parts = {"calls": "calls", "@answer": f"{final} @answer", "text_or_calls": free}
        body = " | ".join(part for name, part in parts.items() if name in top.strip("()").split(" | "))
        rules = [
            f"start: {thoughts} ({body})",
            f'next: text? {end} {begin} "assistant"',
            "text: TEXT",
            "TEXT: /(?s:.+)/",
        ]
        return "\n".join(rules) + "\n"


def _tokens(special: Mapping[str, int], *texts: str) -> list[str]:
    if missing := [text for text in texts if text not in special]:
        raise ChatError(f"{missing[0]} is no token of this model's tokenizer, so its answers cannot be bound")
    return [lark.tag(text, special) for text in texts]
