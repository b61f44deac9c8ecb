"""Converts our grammars to vLLM's `structured_outputs`. vLLM enforces them with llguidance too, if its backend is
`guidance`.
"""

from __future__ import annotations

import json

from palestra.chat.tool_parsers.lark import AS_TRAINED
from palestra.types import Grammar, GrammarKind
from palestra.util.json_types import JsonObject

ANSWER, RULE = "@answer", "answer_itself"


def can_follow(grammar: Grammar | None) -> bool:
    """Whether vLLM can enforce it: not if one grammar is inside another."""
    return grammar is None or grammar.kind is not GrammarKind.LARK or not grammar.around


def structured_outputs(grammar: Grammar) -> JsonObject:
    match grammar.kind:
        case GrammarKind.LARK:
            return {"grammar": grammar.text}
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.text)
            # Its llguidance (1.7) allows white space without end, so it is asked for JSON on one line.
            options = schema.get("x-guidance", {})
            options.pop("whitespace_pattern", None)
            schema["x-guidance"] = options | AS_TRAINED
            return _around(grammar, f"%json {json.dumps(schema)}") if grammar.around else {"json": schema}
        case GrammarKind.REGEX:
            expression = grammar.text.replace("/", r"\/")
            return _around(grammar, f"/{expression}/") if grammar.around else {"regex": grammar.text}


def _around(grammar: Grammar, itself: str) -> JsonObject:
    return {"grammar": f"{grammar.around.replace(ANSWER, RULE)}\n{RULE}: {itself}\n"}
