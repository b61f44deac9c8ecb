"""Explains what is wrong with a config in terms of what the user wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from palestra.util.renamed import new_key
from palestra.util.suggest import nearest

Key = tuple[str | int, ...]

# The message of a default that another mistake left without its data: that mistake is told anyway.
ECHOES = {"default_factory_not_called"}
SENTENCES = {"extra_forbidden", "missing", "value_error"}
# Where pydantic's own words are not for users.
MESSAGES = {
    "model_type": "should hold keys and values",
    "model_attributes_type": "should hold keys and values",
    "dict_type": "should hold keys and values",
    "list_type": "should be a list",
    "path_type": "should be a path",
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
}


def explain(error: ValidationError, model: type[BaseModel], data: object, sources: Mapping[Key, str]) -> list[str]:
    told = [one for one in error.errors() if one["type"] not in ECHOES]
    wrong: dict[Key, list[ErrorDetails]] = {}
    for one in told:
        if one["type"] not in SENTENCES:
            wrong.setdefault(_key_in(data, one["loc"]), []).append(one)
    lines = (
        _line(one, model, data, sources)
        if one["type"] in SENTENCES
        else _wrong_value(key := _key_in(data, one["loc"]), wrong[key], sources)
        for one in told
    )
    return list(dict.fromkeys(lines))


def key_text(key: Key) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".") or "the config"


def _line(one: ErrorDetails, model: type[BaseModel], data: object, sources: Mapping[Key, str]) -> str:
    if one["type"] == "extra_forbidden":
        key = one["loc"]
        if new := new_key(key):
            return f"{key_text(key)} is now called {key_text(new)}{_where(key, sources)}"
        return f"unknown key {key_text(key)!r}{_where(key, sources)}; {_nearest(key, model)}"
    if one["type"] == "missing":
        return f"{key_text(one['loc'])} is missing{_where(one['loc'], sources)}"
    key = _key_in(data, one["loc"])
    where = key_text(key) + ": " if key else ""
    return f"{where}{one['msg'].removeprefix('Value error, ')}{_where(key, sources) if key else ''}"


def _wrong_value(key: Key, kinds: list[ErrorDetails], sources: Mapping[Key, str]) -> str:
    """`kinds`: what it could have been, one or several."""
    first, *more = (
        MESSAGES.get(one["type"]) or one["msg"].removeprefix("Input ").partition(", unable to")[0] for one in kinds
    )
    message = ", or ".join([first, *(other.removeprefix("should be ") for other in more)])
    return f"{key_text(key)} {message}, not {kinds[0]['input']!r:.80}{_where(key, sources)}"


def _where(key: Key, sources: Mapping[Key, str]) -> str:
    """The file or flag that set the key, or else the one that set the object around it."""
    for length in range(len(key), 0, -1):
        if source := sources.get(key[:length]):
            return f" ({source})"
    return ""


def _key_in(data: object, loc: Key) -> Key:
    """The place that pydantic reports, without the names of union members, which the user never wrote."""
    key: Key = ()
    for part in loc:
        inside: Any = dict(enumerate(data)) if isinstance(data, list) else data
        if isinstance(inside, dict) and part in inside:
            key, data = (*key, part), inside[part]
    return key


def _nearest(key: Key, model: type[BaseModel]) -> str:
    *parents, name = key
    here = _model_at(model, parents)
    known = list(here.model_fields)
    near = [path for path in _paths(model) if path.rpartition(".")[2] == name]
    match = nearest(name, known)
    near += [key_text((*parents, match))] if match else []
    return f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"


def _model_at(model: type[BaseModel], parents: list[str | int]) -> type[BaseModel]:
    for part in parents:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All keys, dotted; used to find a name that was written at the wrong depth."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _models_in(field.annotation):
            is_list = "list" in str(field.annotation)
            yield from _paths(inner, f"{prefix}{name}{'[0]' if is_list else ''}.")
