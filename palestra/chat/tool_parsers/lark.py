"""Pieces of grammars in llguidance's Lark dialect.

Owns: quoting, tokens by id, calls by their schemas. Never touches: which format puts them where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from palestra.chat.errors import ChatError
from palestra.util.json_types import JsonMapping

AS_TRAINED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python and the chat templates write it. Free spaces would let a small model write them for ever."""


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def tag(text: str, special: Mapping[str, int]) -> str:
    """By id where it is a token: the pieces of its name would be another text to the model."""
    return f"<[{special[text]}]>" if text in special else literal(text)


def rules(tops: Sequence[str], tools: Sequence[JsonMapping], one_call: Callable[[str, str], str]) -> str:
    """A grammar: `tops`, then a rule `calls_one` for a call of any tool. `one_call` writes it, from the tool's name and
    the rule of its arguments."""
    if not tools:
        raise ChatError("a call needs at least one tool to call")
    functions = [tool.get("function", tool) for tool in tools]
    bodies = [one_call(function["name"], f"calls_arguments_{n}") for n, function in enumerate(functions)]
    arguments = [f"calls_arguments_{n}: %json {_schema(function)}" for n, function in enumerate(functions)]
    return "\n".join([*tops, f"calls_one: {' | '.join(bodies)}", *arguments]) + "\n"


def several(rule: str, between: str) -> str:
    return f"{rule} ({literal(between)} {rule})*"


def call_object(name: str, key: str, arguments: str) -> str:
    """`{"name": …, key: …}`, as most write a call."""
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f'{literal(head)} {arguments} "}}"'


def _schema(function: JsonMapping) -> str:
    """Without `parameters` a function takes none, says OpenAI. Arguments are an object, whatever else is left open."""
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    schema = function.get("parameters")
    return json.dumps({"x-guidance": AS_TRAINED, "type": "object"} | dict(none if schema is None else schema))
