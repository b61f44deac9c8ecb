"""Arguments as Gemma 4 writes them: `{city:<|"|>Rome<|"|>,days:3}`, keys bare and strings between tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from palestra.chat.errors import ChatError
from palestra.chat.tool_calls import read_json
from palestra.chat.tool_parsers import lark
from palestra.chat.tool_parsers.schema_values import options_of, resolved, types_of
from palestra.chat.tool_parsers.value_grammar import (
    OBJECT_KEYS,
    TEXT_KEYS,
    ValueSyntax,
    refuse_unknown,
    text_rules,
)
from palestra.util.json_types import JsonMapping, JsonObject

QUOTE = '<|"|>'
MAX_DEPTH = 64  # of nested objects and lists; no tool's arguments have more
SCALARS = ("integer", "number", "boolean", "null")
ARRAY_KEYS = {"type", "items"}
_BARE = re.compile(r"[^,{}\[\]]*")
_KEY = re.compile(r"\s*([^:,{}\[\]<>]+?)\s*:\s*")


class NotationError(ValueError):
    """The text is not written in this notation."""


def read_arguments(text: str) -> JsonObject | None:
    """Reads an object; None where the text is no such thing."""
    try:
        value, end = _value(text, _spaces(text, 0), 0)
    except NotationError:
        return None
    return value if isinstance(value, dict) and not text[end:].strip() else None


def _value(text: str, at: int, depth: int) -> tuple[object, int]:
    """A value that begins at `at`, and where it ends."""
    if depth > MAX_DEPTH:
        raise NotationError
    if text.startswith(QUOTE, at):
        return _string(text, at)
    if text.startswith("{", at):
        return _object(text, at + 1, depth)
    if text.startswith("[", at):
        return _list(text, at + 1, depth)
    bare = _BARE.match(text, at)
    word = bare[0].strip() if bare else ""
    if bare is None or not word:
        raise NotationError
    if word in ("null", "None"):
        return None, bare.end()
    value = read_json(word)
    return word if value is None else value, bare.end()


def _string(text: str, at: int) -> tuple[str, int]:
    start = at + len(QUOTE)
    end = text.find(QUOTE, start)
    if end < 0:
        raise NotationError
    return text[start:end], end + len(QUOTE)


def _object(text: str, at: int, depth: int) -> tuple[JsonObject, int]:
    found: JsonObject = {}
    at = _spaces(text, at)
    while not text.startswith("}", at):
        key, at = _key(text, at)
        found[key], at = _value(text, at, depth + 1)
        at = _after(text, at, "}")
    return found, at + 1


def _key(text: str, at: int) -> tuple[str, int]:
    if text.startswith(QUOTE, at):
        key, at = _string(text, at)
        at = _spaces(text, at)
        if not text.startswith(":", at):
            raise NotationError
        return key, _spaces(text, at + 1)
    found = _KEY.match(text, at)
    if found is None:
        raise NotationError
    return found[1], found.end()


def _list(text: str, at: int, depth: int) -> tuple[list[object], int]:
    found: list[object] = []
    at = _spaces(text, at)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        found.append(value)
        at = _after(text, at, "]")
    return found, at + 1


def _after(text: str, at: int, closing: str) -> int:
    """Behind the comma, or at the closing bracket."""
    at = _spaces(text, at)
    if text.startswith(",", at):
        return _spaces(text, at + 1)
    if not text.startswith(closing, at):
        raise NotationError
    return at


def _spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


# Grammars


def argument_rules(rule: str, parameters: JsonMapping, special: Mapping[str, int]) -> list[str]:
    """Returns a rule for all arguments of a tool, keys in alphabetical order as the template writes them, and the rules
    of their values."""
    return _Rules(parameters, special).object(rule, parameters, 0)


class _Rules:
    def __init__(self, root: JsonMapping, special: Mapping[str, int]) -> None:
        self._root, self._quote = root, lark.tag(QUOTE, special)
        self._syntax = ValueSyntax(lambda key: "", "", closing=QUOTE, closing_token=special.get(QUOTE))

    def object(self, rule: str, schema: JsonMapping, depth: int) -> list[str]:
        schema = resolved(schema, self._root)
        refuse_unknown(schema, self._root, OBJECT_KEYS, "an object")
        properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
        if not properties and schema.get("additionalProperties", "properties" not in schema) is not False:
            return self.any(rule, ("object",))
        keys, rules = sorted(properties, key=str.lower), list[str]()
        for n, key in enumerate(keys):
            if any(character in key for character in ":,{}[]<>\n"):
                raise ChatError(f"a parameter called {key!r} cannot be written in this model's tool format")
            value = properties[key] if isinstance(properties[key], Mapping) else {}
            rules += [f"{rule}_p{n}: {lark.literal(key + ':')} {rule}_v{n}", *self.value(f"{rule}_v{n}", value, depth)]
        return [f'{rule}: "{{" {rule}_h0 "}}"', *_in_order(rule, [key in required for key in keys]), *rules]

    def value(self, rule: str, schema: JsonMapping, depth: int) -> list[str]:
        schema, types = resolved(schema, self._root), types_of(schema, self._root)
        if options := options_of(schema, self._root):
            return [f"{rule}: {' | '.join(map(self._literal, options))}"]
        if types is None or depth > MAX_DEPTH or schema.keys() & {"anyOf", "oneOf", "allOf"}:
            return self.any(rule, tuple(sorted(types)) if types else (*SCALARS, "string", "array", "object"))
        bodies, rules = list[str](), list[str]()
        for kind in sorted(types):
            own = f"{rule}_{kind}"
            bodies.append(own)
            rules += self._one_type(own, kind, schema, depth)
        return [f"{rule}: {' | '.join(bodies)}", *rules]

    def _one_type(self, rule: str, kind: str, schema: JsonMapping, depth: int) -> list[str]:
        if kind == "object":
            return self.object(rule, schema, depth + 1)
        if kind == "array":
            refuse_unknown(schema, self._root, ARRAY_KEYS, "an array")
            items = schema.get("items")
            inner = self.value(f"{rule}_item", items if isinstance(items, Mapping) else {}, depth + 1)
            return [f'{rule}: "[" ({rule}_item ("," {rule}_item)*)? "]"', *inner]
        if kind == "string":
            refuse_unknown(schema, self._root, TEXT_KEYS, "a string")
            return [f"{rule}: {self._quote} {rule}_s", *text_rules(f"{rule}_s", schema, self._syntax)]
        return [f"{rule}: %json {json.dumps({**schema, 'type': kind})}"]

    def any(self, rule: str, kinds: tuple[str, ...]) -> list[str]:
        """Any values of these types."""
        alternatives = {
            "string": f"{self._quote} {rule}_s",
            "array": f'"[" ({rule}_w ("," {rule}_w)*)? "]"',
            "object": f'"{{" ({rule}_k ":" {rule}_w ("," {rule}_k ":" {rule}_w)*)? "}}"',
        }
        every = [*SCALARS, *alternatives]
        plain = [kind for kind in SCALARS if kind in kinds]
        bodies = [*([f"{rule}_j"] if plain else []), *(alternatives[k] for k in alternatives if k in kinds)]
        whole = [f"{rule}_x", *alternatives.values()]
        return [
            f"{rule}: {' | '.join(bodies)}",
            *([f"{rule}_j: %json {json.dumps({'type': plain})}"] if plain else []),
            f"{rule}_w: {' | '.join(whole)}",
            f"{rule}_x: %json {json.dumps({'type': [kind for kind in every if kind in SCALARS]})}",
            rf"{rule}_k: /[^:,{{}}\[\]<>\s]{{1,64}}/",
            *text_rules(f"{rule}_s", {}, self._syntax),
        ]

    def _literal(self, option: object) -> str:
        if isinstance(option, str):
            return (
                f"({self._quote} {lark.literal(option)} {self._quote})" if option else f"({self._quote} {self._quote})"
            )
        return lark.literal(lark.json_text(option))


def _in_order(rule: str, are_required: list[bool]) -> list[str]:
    """Rules for some of the properties, in their order, with commas between: `h` where none was written yet, `t` where
    some were."""
    last = len(are_required)
    rules = [f'{rule}_h{last}: ""', f'{rule}_t{last}: ""']
    for n, is_required in enumerate(are_required):
        skip_h, skip_t = ("", "") if is_required else (f" | {rule}_h{n + 1}", f" | {rule}_t{n + 1}")
        rules.append(f"{rule}_h{n}: {rule}_p{n} {rule}_t{n + 1}{skip_h}")
        rules.append(f'{rule}_t{n}: "," {rule}_p{n} {rule}_t{n + 1}{skip_t}')
    return rules
