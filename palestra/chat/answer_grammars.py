"""Grammars of what is around the part of an answer that must look a certain way: thinking before it, text before calls.

Owns: rules for thoughts and for free text, in llguidance's Lark dialect. Never touches: which requests ask for one.
"""

from __future__ import annotations

from collections.abc import Collection

from palestra.chat.tokenizer import ChatTokenizer
from palestra.chat.tool_calls import END_THINK, THINK
from palestra.chat.tool_parsers import AnswerStart, ToolParser
from palestra.chat.tool_parsers.lark import escaped, tag


def answer_rules(tokenizer: ChatTokenizer, tools: ToolParser, top: str, *, start: AnswerStart, may_think: bool) -> str:
    """As `AnswerFormat.layout`, for answers with think tags; `may_think`: unless the prompt has opened a thought."""
    is_open = start is AnswerStart.IN_THOUGHT
    rules = text_or_calls(tokenizer, tools) if top == "text_or_calls" else ""
    if is_open or (tokenizer.thinks and may_think):
        top, rules = f"thinking {top}", rules + thinking(tokenizer, is_open=is_open)
    return f"start: {top}\n{rules}"


def thinking(tokenizer: ChatTokenizer, *, is_open: bool) -> str:
    """Rule `thinking`: a think block, or none. `is_open`: the prompt has opened one."""
    special = tokenizer.special_texts
    block = rf"thinking_text? {tag(END_THINK, special)} /\n{{1,2}}/?"
    top = block if is_open else f"({tag(THINK, special)} {block})?"
    return f"thinking: {top}\n{_text('thinking_text', (END_THINK,), _plain_tokens(tokenizer, (END_THINK,)))}"


def text_or_calls(tokenizer: ChatTokenizer, tools: ToolParser) -> str:
    """Rule `text_or_calls`, for a grammar with a rule `calls`: any text in which neither a call nor a thought begins,
    and then calls; one of the two may be missing. Where calls have no marker, it is one or the other."""
    others = _plain_tokens(tokenizer, (THINK, END_THINK, *tools.tags))
    text = _text("text", (THINK, END_THINK, *tools.markers), others, not_first=tools.openings)
    return f"text_or_calls: {'text? | calls' if tools.openings else 'text? calls?'}\n{text}"


def _text(name: str, excluded: Collection[str], others: str, not_first: Collection[str] = ()) -> str:
    """A rule for any text in which none of `excluded` occurs, and that does not begin as one of `not_first` does. A
    lexer takes as much as it can and never goes back: so a piece ends where something excluded may begin, and the next
    one is nothing of the kind. Then only another such piece can follow, or it would go on to become what it must not.
    """
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
    """Added tokens that are text like any other, as far as the model is concerned."""
    plain = {token for text, token in tokenizer.special_texts.items() if text not in but} - tokenizer.special_ids()
    return f"<[{','.join(map(str, sorted(plain)))}]>" if plain else ""


def _class(texts: Collection[str]) -> str:
    """Their first characters."""
    return escaped("".join(sorted({text[0] for text in texts})))
