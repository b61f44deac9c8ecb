"""Formats for the text of an answer: JSON, a schema, a regular expression, one of a few choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import msgspec

from palestra.chat.tool_parsers.lark import literal
from palestra.server.core.errors import ApiError
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid
from palestra.server.model_api.openai_chat.schemas import SamplingFields
from palestra.types import MAX_GRAMMAR, Grammar, GrammarKind
from palestra.util.json_types import JsonMapping, JsonObject

OBJECT = {"type": "object"}
OPTIONS = "x-guidance"
SPACE = {"whitespace_pattern": r" ?(\n {0,24})?"}
"""Enough for JSON on one line or indented; a small model would fill the answer with any white space that is allowed."""
BEST_EFFORT = {"lenient": True}
"""As with OpenAI: without `strict`, keywords that are not supported are ignored."""
HARMLESS = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
"""Fields of vLLM that change nothing when false: white space is limited anyway, and schemas are followed as they
are."""


def content_format(call: SamplingFields) -> Grammar | None:
    requested = [(name, grammar) for name, grammar in _requested_formats(call) if grammar is not None]
    if len(requested) > 1:
        (first, _), (second, _), *_ = requested
        raise invalid(second, f"{first} and {second} both define the form of the answer; send one of them")
    return msgspec.structs.replace(requested[0][1], asked_by=requested[0][0]) if requested else None


def check_size(where: str, value: object) -> None:
    """Checks the size before anything is done with the value, because this thread serves all clients. Its JSON would be
    a little larger."""
    size, values = 0, [value]
    while values and size <= MAX_GRAMMAR:
        one = values.pop()
        size += len(one) if isinstance(one, str | list | dict) else 1
        if size <= MAX_GRAMMAR and isinstance(one, list | dict):
            values += one  # iterating a dict gives its keys
            values += one.values() if isinstance(one, dict) else ()
    if size > MAX_GRAMMAR:
        raise _wrong(where, f"it has more than {MAX_GRAMMAR} characters, which is the limit; send a smaller one")


def _requested_formats(call: SamplingFields) -> Iterator[tuple[str, Grammar | None]]:
    if call.response_format is not None:
        check_size("response_format", call.response_format)
        yield "response_format", _response_format(call.response_format)
    for name, value in (call.structured_outputs or {}).items():
        check_size(f"structured_outputs.{name}", value)
        yield f"structured_outputs.{name}", _structured(name, value)
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(call, f"guided_{name}")) is not None:
            check_size(f"guided_{name}", value)
            yield f"guided_{name}", KINDS[name](f"guided_{name}", value)


def _response_format(given: JsonObject) -> Grammar | None:
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _json("response_format", OBJECT)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)} as wanted}:
            return _json("response_format", schema, {} if wanted.get("strict") else BEST_EFFORT)
        case {"type": "json_schema"}:
            detail = 'a schema is missing; send {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
        case _:
            detail = f"{shown(given.get('type'))} is not a type; send text, json_object or json_schema"
    raise _wrong("response_format", detail)


def _structured(name: str, value: object) -> Grammar | None:
    where = f"structured_outputs.{name}"
    if value is None or (value is False and name in ("json_object", *HARMLESS)):
        return None
    if name == "json_object":
        if value is not True:
            raise _wrong(where, f"{shown(value)} is neither true nor false")
        return _json(where, OBJECT)
    if name not in KINDS:
        raise invalid(where, f"{where} is not supported here; send one of {', '.join(KINDS)}, json_object")
    return KINDS[name](where, value)


def _json(where: str, schema: object, options: JsonMapping = MappingProxyType({})) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _wrong(where, f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _wrong(where, f"{shown(schema)} is not a JSON schema, which is an object")
    theirs = schema.get(OPTIONS)
    if theirs is None or isinstance(theirs, dict):
        schema = {**schema, OPTIONS: {**SPACE, **options, **(theirs or {})}}
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema, ensure_ascii=False))


def _regex(where: str, expression: object) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=_required_text(where, expression))


def _grammar(where: str, grammar: object) -> Grammar:
    return Grammar(kind=GrammarKind.LARK, text=_required_text(where, grammar))


def _one_of(where: str, choices: object) -> Grammar:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise _wrong(where, "it must be a list of at least one text")
    # One terminal: there may be thousands of choices, and with rules each would be tracked at every token.
    texts = " | ".join(map(literal, dict.fromkeys(choices)))
    return Grammar(kind=GrammarKind.LARK, text=f"start: CHOICE\nCHOICE: {texts}")


def _required_text(where: str, given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        raise _wrong(where, f"{shown(given)} must be a text that is not empty")
    return given


KINDS: dict[str, Callable[[str, Any], Grammar]] = {
    "json": _json,
    "regex": _regex,
    "choice": _one_of,
    "grammar": _grammar,
}


def _wrong(where: str, detail: str) -> ApiError:
    return invalid(where, f"{where}: {detail}")
