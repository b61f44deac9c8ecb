"""Grammars for what surrounds the constrained part of an answer: reasoning before it, text before calls."""

from __future__ import annotations

from collections.abc import Collection

from palestra.chat.tokenizer import ChatTokenizer
from palestra.chat.tool_calls import END_THINK, THINK
from palestra.chat.tool_parsers import AnswerStart, ToolParser
from palestra.chat.tool_parsers.lark import escaped, tag


def answer_rules(tokenizer: ChatTokenizer, tools: ToolParser, top: str, *, start: AnswerStart, may_think: bool) -> str:
    """Like `AnswerFormat.layout`, for answers with think tags. `may_think` allows a think block, unless the prompt has
    opened one."""
    is_open = start is AnswerStart.IN_THOUGHT
    rules = text_or_calls(tokenizer, tools) if top == "text_or_calls" else ""
    if is_open or (tokenizer.thinks and may_think):
        top, rules = f"thinking {top}", rules + thinking(tokenizer, is_open=is_open)
    return f"start: {top}\n{rules}"


def thinking(tokenizer: ChatTokenizer, *, is_open: bool) -> str:
    """Returns the rule `thinking`: a think block, or none. `is_open`: the prompt has opened one."""
    special = tokenizer.special_texts
    block = rf"thinking_text? {tag(END_THINK, special)} /\n{{1,2}}/?"
    top = block if is_open else f"({tag(THINK, special)} {block})?"
    return f"thinking: {top}\n{_text('thinking_text', (END_THINK,), _plain_tokens(tokenizer, (END_THINK,)))}"


def text_or_calls(tokenizer: ChatTokenizer, tools: ToolParser) -> str:
    """Returns the rule `text_or_calls`, for a grammar with a rule `calls`: any text in which neither a call nor a think
    block begins, and then calls; one of the two may be missing. If calls have no marker, it is either text or calls."""
    others = _plain_tokens(tokenizer, (THINK, END_THINK, *tools.tags))
    text = _text("text", (THINK, END_THINK, *tools.markers), others, not_first=tools.openings)
    return f"text_or_calls: {'text? | calls' if tools.openings else 'text? calls?'}\n{text}"


def _text(name: str, excluded: Collection[str], others: str, not_first: Collection[str] = ()) -> str:
    """Returns a rule for any text in which none of `excluded` occurs, and that does not begin like one of `not_first`.
    A lexer takes as much as it can and never goes back, so a piece ends where an excluded text may begin, and the next
    piece starts with something that cannot continue it. After that only another such piece may follow, because
    otherwise the excluded text could still be completed."""
    edge, piece = _class(excluded), name.upper()
    first = rf"[^{edge}{_class(not_first)}\s][^{edge}]*" if not_first else f"[^{edge}]+"
    going_on = f"({piece}_FROM{f' | {others} {piece}?' if others else ''})"
    rules = [
        f"{name}: ({piece}_FIRST | {going_on}) {going_on}*",
        f"{piece}_FIRST: /{first}/",
        f"{piece}_FROM: /[{edge}][^{edge}]*/ & ~/({'|'.join(map(escaped, excluded))})(?s:.*)/",
        f"{piece}: /[^{edge}]+/" if others else "",
    ]
    return "\n".join(rules) + "\n"


def _plain_tokens(tokenizer: ChatTokenizer, but: Collection[str]) -> str:
    """Returns a rule for added tokens that are ordinary text to the model."""
    plain = {token for text, token in tokenizer.special_texts.items() if text not in but} - tokenizer.special_ids()
    return f"<[{','.join(map(str, sorted(plain)))}]>" if plain else ""


def _class(texts: Collection[str]) -> str:
    """Returns a character class of the first characters."""
    return escaped("".join(sorted({text[0] for text in texts})))
