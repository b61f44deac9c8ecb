"""Grammars of arguments that are texts between tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from palestra.chat.errors import ChatError
from palestra.chat.tool_parsers import lark
from palestra.chat.tool_parsers.schema_values import STRING, options_of, resolved, types_of
from palestra.util.json_types import JsonMapping

TEXT_KEYS = {"type", "minLength", "maxLength", "pattern", "nullable", "enum", "const"}
NOTES = {"title", "description", "default", "examples", "$ref", "$schema", "$id", "$comment", "x-guidance"}
"""Keys of a schema that constrain nothing, or were handled before."""
EMPTY = '""'
OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "strict", "$defs", "definitions"}


@dataclass(frozen=True, slots=True)
class ValueSyntax:
    opening: Callable[[str], str]
    """Returns for a key what comes before its value, in Lark."""
    any_opening: str
    """The same for any key."""
    closing: str
    """The text after a value, which no value contains."""
    closing_token: int | None = None
    """The token id of that text, if it is one token."""
    after: str = ""
    """What comes after `closing`."""


def value_rules(rule: str, parameters: JsonMapping, syntax: ValueSyntax) -> list[str]:
    """Returns a rule for all arguments of a tool, in the order of its schema, and the rules of their values."""
    schema = resolved(parameters, parameters)
    refuse_unknown(schema, parameters, OBJECT_KEYS, "the arguments")
    properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
    # A schema that lists properties, even none, allows only these.
    if not properties and schema.get("additionalProperties", "properties" not in schema) is not False:
        return [f"{rule}: ({syntax.any_opening} {rule}_any)*", *text_rules(f"{rule}_any", {}, syntax)]
    values, rules = list[str](), list[str]()
    for number, (key, value) in enumerate(properties.items()):
        if any(character in key for character in "<>\n"):
            raise ChatError(f"a parameter called {key!r} cannot be written in this model's tool format")
        values.append(f"({syntax.opening(key)} {rule}_{number}){'' if key in required else '?'}")
        rules += _value(f"{rule}_{number}", value if isinstance(value, Mapping) else {}, parameters, syntax)
    return [f"{rule}: {' '.join(values) or EMPTY}", *rules]


def _value(rule: str, schema: JsonMapping, root: JsonMapping, syntax: ValueSyntax) -> list[str]:
    types, options = types_of(schema, root), options_of(schema, root)
    if options:
        written = [option if isinstance(option, str) else lark.json_text(option) for option in options]
        return [f"{rule}: ({' | '.join(map(lark.literal, written))}) {_end(syntax)}"]
    if types is None or "string" in types:
        schema = resolved(schema, root)
        if types == STRING:
            refuse_unknown(schema, root, TEXT_KEYS, "a string")
        return text_rules(rule, schema if types == STRING else {}, syntax)
    shared = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
    whole = json.dumps({"x-guidance": lark.AS_TRAINED} | shared | dict(schema))
    also = ' | "True" | "False"' if types == {"boolean"} else ""
    return [f"{rule}: ({rule}_json{also}) {_end(syntax)}", f"{rule}_json: %json {whole}"]


def text_rules(rule: str, schema: JsonMapping, syntax: ValueSyntax) -> list[str]:
    """Returns a rule for any text in which `closing` does not occur, within the limits of a schema."""
    closing = "" if syntax.closing_token is not None else lark.escaped(syntax.closing)
    bounds = [f"/{bound}{closing}/" for bound in _bounds(schema)]
    terminal = f"{rule.upper()}_TEXT"
    if syntax.closing_token is not None:
        some = terminal if schema.get("minLength") else f"{terminal}?"
        return [f"{rule}: {some} {_end(syntax)}", f"{terminal}: {' & '.join(bounds)}"]
    inner = lark.escaped(syntax.closing.strip())
    bounds.append(f"~/(?s:.*){inner}(?s:.*){inner}(?s:.*)/")
    after = f" {lark.literal(syntax.after)}" if syntax.after else ""
    return [f"{rule}: {rule}_text{after}", f"{rule}_text[lazy]: {terminal}", f"{terminal}: {' & '.join(bounds)}"]


def _bounds(schema: JsonMapping) -> Iterator[str]:
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    yield f"(?s:.{{{least},{most}}})" if least or most != "" else "(?s:.*)"
    if isinstance(pattern := schema.get("pattern"), str):
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
        inner = pattern.removeprefix("^")
        inner = (inner[:-1] if ends else inner).replace("/", r"\/")
        yield f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"


def _end(syntax: ValueSyntax) -> str:
    if syntax.closing_token is None:
        return lark.literal(syntax.closing + syntax.after)
    return f"<[{syntax.closing_token}]>" + (f" {lark.literal(syntax.after)}" if syntax.after else "")


def refuse_unknown(schema: JsonMapping, root: JsonMapping, known: set[str], what: str) -> None:
    """Refuses schema keys that a grammar cannot express, unless they may be ignored."""
    unknown = sorted(schema.keys() - known - NOTES)
    if unknown and not (root.get("x-guidance") or {}).get("lenient"):
        raise ChatError(f"{unknown[0]!r} of {what} cannot be followed in this model's tool format")
