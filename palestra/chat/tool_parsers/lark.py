"""Parts of grammars in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from palestra.chat.errors import ChatError
from palestra.chat.tool_parsers.schema_values import function_of
from palestra.util.json_types import JsonMapping

PUNCTUATION = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
AS_TRAINED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python and the chat templates write it. If spaces were free, a small model could write them for ever."""


def json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def literal(text: str) -> str:
    return json_text(text)


def tag(text: str, special: Mapping[str, int]) -> str:
    """Returns a tag, by token id if it is one token: its characters would be different tokens for the model."""
    return f"<[{special[text]}]>" if text in special else literal(text)


def escaped(text: str) -> str:
    """Escapes a text for a regular expression."""
    return PUNCTUATION.sub(r"\\\g<0>", text).replace("\n", r"\n")


def rules(tops: Sequence[str], tools: Sequence[JsonMapping], one_call: Callable[[str, str], str]) -> str:
    """Returns a grammar whose arguments are JSON."""
    return grammar(tops, tools, one_call, _json_rules)


def grammar(
    tops: Sequence[str],
    tools: Sequence[JsonMapping],
    one_call: Callable[[str, str], str],
    arguments: Callable[[str, JsonMapping], Sequence[str]],
) -> str:
    """Returns a grammar: `tops`, then a rule `calls_one` for a call of any tool. `one_call` writes a call, from the
    tool's name and the name of the rule of its arguments; `arguments` writes that rule, from its name and the
    schema."""
    if not tools:
        raise ChatError("a call needs at least one tool to call")
    functions = [function_of(tool) for tool in tools]
    bodies = [one_call(function["name"], f"calls_arguments_{n}") for n, function in enumerate(functions)]
    written = [arguments(f"calls_arguments_{n}", _schema(function)) for n, function in enumerate(functions)]
    rules = [rule for one in written for rule in one]
    return "\n".join([*tops, f"calls_one: {' | '.join(bodies)}", *rules]) + "\n"


def several(rule: str, between: str) -> str:
    return f"{rule} ({literal(between)} {rule})*"


def call_object(name: str, key: str, arguments: str) -> str:
    """Returns a rule for `{"name": …, key: …}`, which is how most models write a call."""
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f'{literal(head)} {arguments} "}}"'


def _json_rules(rule: str, schema: JsonMapping) -> list[str]:
    return [f"{rule}: %json {json.dumps(schema)}"]


def _schema(function: JsonMapping) -> JsonMapping:
    """Returns the schema of the arguments. According to OpenAI a function without `parameters` takes none. Arguments
    are always an object."""
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    schema = function.get("parameters")
    return {"x-guidance": AS_TRAINED, "type": "object"} | dict(none if schema is None else schema)
