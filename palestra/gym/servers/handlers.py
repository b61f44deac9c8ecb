"""Methods whose parameters are the fields they take from a body.

    async def verify(self, response: dict[str, Any], expected_answer: str) -> float: ...

Two names are special: `session` is the caller's, `row` the whole body.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from palestra.gym.errors import BadCall, FieldProblem, GymConfigError
from palestra.util.json_types import JsonMapping, JsonObject

SESSION, ROW = "session", "row"
REQUIRED = inspect.Parameter.empty
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
AS_IT_IS = {dict: dict, JsonObject: dict, list: list, list[Any]: list}
"""Types that are checked but not converted, because copying all token ids is expensive."""


class HandlerField(Struct, frozen=True):
    name: str
    type: Any
    default: Any = REQUIRED

    def value(self, body: JsonMapping, problems: list[FieldProblem]) -> Any:
        if self.name not in body:
            if self.default is REQUIRED:
                problems.append(_problem("missing", [self.name], "Field required", body))
            return self.default
        given = body[self.name]
        plain = AS_IT_IS.get(self.type)
        if self.type is Any or (plain is not None and isinstance(given, plain)):
            return given
        try:
            return msgspec.convert(given, self.type, strict=False)
        except msgspec.ValidationError as error:
            message = str(error).replace("`$", f"`{self.name}")
            problems.append(_problem("type_error", [self.name], message, given))
            return None


class ToolSpec(Struct, frozen=True):
    name: str
    description: str
    parameters: JsonObject

    def as_param(self) -> JsonObject:
        """The tool as an entry of `responses_create_params.tools`."""
        return {"type": "function", **{name: getattr(self, name) for name in self.__struct_fields__}, "strict": False}


class Handler:
    """One method with its parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        self.description = (inspect.getdoc(function) or "").strip()
        hints = _hints(function)
        own = list(inspect.signature(function).parameters.values())[1:]
        parameters = [one for one in own if one.kind not in VARIADIC]
        named = [one.name for one in parameters]
        self._takes_session, self._takes_row = SESSION in named, ROW in named
        self._is_async = inspect.iscoroutinefunction(function)
        self.fields = [
            HandlerField(one.name, hints.get(one.name, Any), one.default)
            for one in parameters
            if one.name not in (SESSION, ROW)
        ]
        try:
            self.schema = _schema(self.fields)
        except TypeError as error:
            raise GymConfigError(f"{function.__qualname__}: a parameter cannot be read from JSON: {error}") from None

    async def run(self, server: object, session: object, body: object, *, is_strict: bool = False) -> Any:
        """Calls the method with the fields of a body. `is_strict`: unknown fields are refused. Raises BadCall."""
        given = self.checked(body, is_strict=is_strict)
        if self._takes_session:
            given[SESSION] = session
        if self._takes_row:
            given[ROW] = body
        result = self.function(server, **given)
        return await result if self._is_async else result

    def checked(self, body: object, *, is_strict: bool = False) -> JsonObject:
        if not isinstance(body, dict):
            raise BadCall(422, [_problem("dict_type", [], "Input should be an object", body)])
        problems: list[FieldProblem] = []
        found = {one.name: one.value(body, problems) for one in self.fields}
        if is_strict and not self._takes_row:
            unknown = [name for name in body if name not in found]
            problems += [_problem("extra_forbidden", [n], "Extra inputs are not permitted", body[n]) for n in unknown]
        if problems:
            raise BadCall(422, problems)
        return found


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise GymConfigError(
            f"{function.__qualname__}: {error}. Names in annotations must exist when the class is made: "
            "import them at runtime, not only for type checkers"
        ) from None


def _problem(kind: str, where: list[str], message: str, given: object) -> FieldProblem:
    return {"type": kind, "loc": ["body", *where], "msg": message, "input": given}


def _schema(fields: list[HandlerField]) -> JsonObject:
    schemas, components = msgspec.json.schema_components([one.type for one in fields], ref_template="#/$defs/{name}")
    found: JsonObject = {
        "type": "object",
        "properties": {one.name: schema for one, schema in zip(fields, schemas, strict=True)},
        "required": [one.name for one in fields if one.default is REQUIRED],
        "additionalProperties": False,
    }
    return found | {"$defs": components} if components else found
