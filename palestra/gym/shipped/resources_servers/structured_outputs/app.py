"""Structured output: an answer, or the arguments of a call, validated against a JSON Schema."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import tomllib
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from palestra.gym.errors import BadCall
from palestra.gym.servers.resources import ResourcesServer, ResourcesSettings, ReverifyMode
from palestra.gym.servers.responses import function_calls, output_text
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

_FENCE = re.compile(r"^```\w*[ \t]*\n(.*?)\n?```$", re.DOTALL)


class SchemaType(StrEnum):
    JSON = "json"
    YAML = "yaml"
    TOML = "toml"
    CSV = "csv"


class SchemaMismatch(Exception):
    """The answer does not match: its kind, and what is wrong."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StructuredOutputs(ResourcesServer[ResourcesSettings]):
    reverify_mode = ReverifyMode.STATELESS

    async def verify(
        self,
        response: JsonObject,
        schema_str: str,
        schema_type: SchemaType = SchemaType.JSON,
        response_mode: Literal["text", "tool_call"] | None = "text",
        tool_name: str | None = None,
        tool_payload_key: str | None = None,
    ) -> JsonMapping:
        validator = _validator(schema_str)
        try:
            if response_mode == "tool_call":
                found = payload_of(response, tool_name, tool_payload_key)
            else:
                found = parsed(output_text(response), schema_type)
            await asyncio.to_thread(_check, validator, found)  # a long list may take seconds
        except SchemaMismatch as error:
            return {"reward": 0.0, "error_type": error.kind, "error_message": str(error)[:500]}
        return {"reward": 1.0, "error_type": None, "error_message": None}

    def compute_metrics(self, tasks: list[list[JsonMapping]]) -> JsonPayload:
        by_type: dict[str, list[float]] = {}
        for one in (rollout for task in tasks for rollout in task):
            by_type.setdefault(one.get("schema_type", SchemaType.JSON), []).append(one.get("reward", 0.0))
        return {f"mean/reward_{kind}": sum(rewards) / len(rewards) for kind, rewards in by_type.items()}


def parsed(text: str, kind: SchemaType) -> Any:
    """Parses the text. Raises SchemaMismatch."""
    bare = text.strip()
    fenced = _FENCE.match(bare)
    try:
        return _READERS[kind](fenced[1] if fenced else bare)
    except (ValueError, yaml.YAMLError, csv.Error, RecursionError) as error:
        raise SchemaMismatch("parse_error", f"not {kind}: {error}") from error


def payload_of(response: JsonMapping, name: str | None, key: str | None) -> Any:
    """Returns the arguments of the only call. Raises SchemaMismatch."""
    calls = function_calls(response.get("output", []))
    if len(calls) != 1:
        raise SchemaMismatch(
            "missing_tool_call" if not calls else "multiple_tool_calls", f"expected one call, found {len(calls)}"
        )
    call: Any = calls[0]
    if name is not None and call["name"] != name:
        raise SchemaMismatch("wrong_tool_name", f"expected a call of {name}, found {call['name']}")
    found = parsed(call["arguments"], SchemaType.JSON)
    if key is None:
        return found
    if not isinstance(found, dict) or key not in found:
        raise SchemaMismatch("missing_payload", f"the arguments have no {key!r}")
    return found[key]


def _check(validator: Draft202012Validator, found: Any) -> None:
    """Validates. Raises SchemaMismatch, or BadCall if the schema refers to something that does not exist."""
    try:
        error = next(validator.iter_errors(found), None)
    except Unresolvable as problem:
        raise BadCall(422, f"schema_str refers to what is not in it: {problem}"[:500]) from problem
    except (RecursionError, TypeError) as problem:  # too deep; in YAML, keys that are not text
        raise SchemaMismatch("validation_error", f"cannot be checked: {problem}") from problem
    if error is not None:
        where = "/".join(map(str, error.absolute_path)) or "the top"
        raise SchemaMismatch("validation_error", f"{where}: {error.message}")


def _validator(schema: str) -> Draft202012Validator:
    try:
        found = json.loads(schema)
        Draft202012Validator.check_schema(found)
    except (ValueError, RecursionError, SchemaError) as error:
        raise BadCall(422, f"schema_str is no JSON Schema: {error}"[:500]) from error
    return Draft202012Validator(found, registry=Registry())  # this registry fetches nothing


def _rows(text: str) -> list[JsonObject]:
    """Parses CSV; cells that are numbers become numbers."""
    reader = csv.DictReader(io.StringIO(text), strict=True)
    rows = list(reader)
    if not rows or any(None in row or None in row.values() for row in rows):
        raise ValueError("every line has as many cells as the header, and there is one at least")
    return [{name: _cell(value) for name, value in row.items()} for row in rows]


def _cell(text: str) -> Any:
    try:
        return _json(text)
    except ValueError:
        return text


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_number)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


class _PlainLoader(yaml.SafeLoader):
    """A loader without aliases: nine lines of them can stand for a billion texts."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)


def _yaml(text: str) -> Any:
    return yaml.load(text, _PlainLoader)  # it derives from the safe loader


_READERS: dict[SchemaType, Callable[[str], Any]] = {
    SchemaType.JSON: _json,
    SchemaType.YAML: _yaml,
    SchemaType.TOML: tomllib.loads,
    SchemaType.CSV: _rows,
}
