"""Converts JSON bodies to records and back; an error names the wrong field and the nearest known one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import inspect

from palestra.server.core.errors import Refusal
from palestra.server.core.wire_errors import shown
from palestra.server.http.body import read_body
from palestra.util.suggest import did_you_mean

T = TypeVar("T")

LONG_BYTES = 1 << 16  # checking every name in a larger body takes about 10 ms, so it is done in a thread
MAX_DEPTH = 64  # of nesting; an answer that repeats the value is nested deeper still
MAX_INT = 2**63 - 1


async def read_record(request: Request, kind: type[T], *, others_pass: bool = False) -> T:
    """Reads a body. `others_pass` allows unknown fields, for clients that are not ours."""
    body = await read_body(request)
    if len(body) > LONG_BYTES:  # in a thread, so that other requests get their turn
        return await asyncio.to_thread(record_of, body, kind, others_pass=others_pass)
    return record_of(body, kind, others_pass=others_pass)


def json_response(record: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(record), media_type="application/json")


def record_of(body: bytes, kind: type[T], *, others_pass: bool = False) -> T:
    try:
        raw = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise Refusal(400, f"the body must be a JSON object, found {type(raw).__name__}")
    _check_values(raw)
    if not others_pass:
        _check_record(kind, raw, "")
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise Refusal(400, _error_text(str(error))) from None


def _check_values(raw: Any) -> None:
    level = [raw]
    for _ in range(MAX_DEPTH):
        inner = [value for one in level for value in (one.values() if isinstance(one, dict) else one)]
        if any(isinstance(value, int) and abs(value) > MAX_INT for value in inner):
            raise Refusal(400, "a number in the body does not fit into 64 bits")
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return
    raise Refusal(400, f"the body is nested deeper than {MAX_DEPTH} levels")


_Check = Callable[[Any, str], None]
"""Checks the value at a place."""


def _check_of(info: inspect.Type) -> _Check | None:
    """Returns a check for values of this type; None: nothing in it has field names."""
    match info:
        case inspect.StructType():
            return partial(_check_record, info.cls)
        case inspect.EnumType():
            return partial(_check_value, info.cls)
        case inspect.ListType() | inspect.VarTupleType():
            inner = _check_of(info.item_type)
            return None if inner is None else partial(_check_items, inner)
        case inspect.UnionType():
            checks = [check for one in info.types if (check := _check_of(one)) is not None]
            return partial(_check_all, checks) if checks else None
        case _:
            return None


@cache
def _fields(kind: type[Any]) -> tuple[dict[str, None], list[tuple[str, _Check]]]:
    """Returns the field names, and the fields whose values need a check."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    checks = [(field.encode_name, _check_of(field.type)) for field in info.fields]
    names = dict.fromkeys(field.encode_name for field in info.fields)
    return names, [(name, check) for name, check in checks if check is not None]


@cache
def _values(kind: type[Enum]) -> dict[str, None]:
    return dict.fromkeys(str(value.value) for value in kind)


def _check_record(kind: type[Any], raw: object, where: str) -> None:
    if not isinstance(raw, dict):
        return
    names, inner = _fields(kind)
    if not raw.keys() <= names.keys():
        name = next(name for name in raw if name not in names)
        raise Refusal(400, _unknown(_at(where, name), name, list(names)))
    for name, check in inner:
        if name in raw:
            check(raw[name], _at(where, name))


def _check_value(kind: type[Enum], raw: object, where: str) -> None:
    if isinstance(raw, str) and raw not in _values(kind):
        raise Refusal(400, f"{where}: {shown(raw)} is unknown; send one of {', '.join(_values(kind))}")


def _check_items(check: _Check, raw: object, where: str) -> None:
    for place, value in enumerate(raw if isinstance(raw, list) else ()):
        check(value, f"{where}[{place}]")


def _check_all(checks: Sequence[_Check], raw: object, where: str) -> None:
    for check in checks:
        check(raw, where)


def _at(where: str, name: str) -> str:
    shown_name = name if name.isidentifier() and len(name) <= 64 else shown(name)
    return f"{where}.{shown_name}" if where else shown_name


def _unknown(where: str, name: str, known: list[str]) -> str:
    return f"{where}: unknown field; {did_you_mean(name, known)}"


_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<where>.*)`)?$", re.DOTALL)


def _error_text(text: str) -> str:
    """Moves the place in msgspec's text, which comes last, to the front."""
    found = _PLACE.match(text)
    assert found is not None
    what = found["what"].replace("`", "")
    where = (found["where"] or "").lstrip(".")
    if what.startswith("Object missing required field "):
        name = what.removeprefix("Object missing required field ")
        return f"{_at(where, name)} is missing"
    what = what[:1].lower() + what[1:]
    return f"{where}: {what}" if where else what
