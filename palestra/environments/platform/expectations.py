"""The changes that a task expects; any other is wrong."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from palestra.environments.platform.changes import Change, ChangeKind
from palestra.util.json_types import JsonMapping


class _Free:
    """Any value."""

    def __repr__(self) -> str:
        return "FREE"


FREE = _Free()
"""Stands for a value that may be anything."""


class FreeText(msgspec.Struct, frozen=True):
    """Free text that must say this: upper and lower case, spaces and a full stop at the end do not matter."""

    wanted: str

    def fits(self, found: object) -> bool:
        return isinstance(found, str) and normal(found) == normal(self.wanted)


class NewRow(msgspec.Struct, frozen=True):
    """The id of a row that is made, whatever it will be: in the row itself as `id`, in others as a reference to it."""

    name: str
    """The same for the row and all references to it."""


def normal(text: str) -> str:
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(words).rstrip(".!")


class InsertedRow(msgspec.Struct, frozen=True):
    """A new row. Columns that are not named may have any value only if `others` says so."""

    table: str
    fields: JsonMapping
    others: bool = True


class UpdatedRow(msgspec.Struct, frozen=True):
    """Exactly these columns of a row change, to these values."""

    table: str
    key: tuple[Any, ...]
    fields: JsonMapping


class DeletedRow(msgspec.Struct, frozen=True):
    """A row that must be gone."""

    table: str
    key: tuple[Any, ...]


Expected = InsertedRow | UpdatedRow | DeletedRow
"""A change that a task requires."""


class Mismatch(msgspec.Struct, frozen=True):
    missing: list[str]
    """Changes that were expected and did not happen."""
    stray: list[str]
    """Changes that happened and were not expected."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.stray)


class ChangeMatch(msgspec.Struct, frozen=True):
    met: frozenset[int]
    """Places of the expectations that are met."""
    used: frozenset[int]
    """Places of the changes that meet them."""


def match_changes(expected: Sequence[Expected], found: Sequence[Change]) -> ChangeMatch:
    """Compares. Each expectation is met by a change of its own: a matching in a small bipartite graph."""
    ids = _ids_of_new_rows(expected, found)
    fits = [[n for n, change in enumerate(found) if _fits(one, change, ids)] for one in expected]
    taken: dict[int, int] = {}
    for one in range(len(expected)):
        _place(one, fits, taken, set())
    return ChangeMatch(frozenset(taken.values()), frozenset(taken))


def mismatch(expected: Sequence[Expected], found: Sequence[Change]) -> Mismatch:
    """Returns what is missing and what is too much, in words."""
    matched = match_changes(expected, found)
    return Mismatch(
        missing=[_expectation_text(one) for n, one in enumerate(expected) if n not in matched.met],
        stray=[change_text(change) for n, change in enumerate(found) if n not in matched.used],
    )


NewIds = Mapping[str, object]
"""The id of each `NewRow`, by its name; while they are searched for, one that is missing may be any."""


def _ids_of_new_rows(expected: Sequence[Expected], found: Sequence[Change]) -> NewIds:
    """Finds the row that was made for each `NewRow`: one that fits, and to which the most references fit."""
    ids: dict[str, object] = {}
    unmade: dict[str, object] = {}
    taken: set[int] = set()
    for one in expected:
        name = _new_name(one)
        if name is None:
            continue
        fitting = [n for n, change in enumerate(found) if n not in taken and _fits(one, change, ids)]
        referring = [other for other in expected if other is not one and _refers_to(other, name)]
        best = max(
            fitting, key=lambda n: _references(referring, found, {**ids, str(name): found[n].after["id"]}), default=-1
        )
        if best < 0:
            unmade[name] = object()  # equal to nothing
        else:
            taken.add(best)
            ids[name] = found[best].after["id"]
    return ids | unmade


def _new_name(one: Expected) -> str | None:
    value = one.fields.get("id") if isinstance(one, InsertedRow) else None
    return value.name if isinstance(value, NewRow) else None


def _refers_to(one: Expected, name: str) -> bool:
    return isinstance(one, InsertedRow) and any(
        isinstance(value, NewRow) and value.name == name for value in one.fields.values()
    )


def _references(referring: Sequence[Expected], found: Sequence[Change], ids: NewIds) -> int:
    return sum(any(_fits(one, change, ids) for change in found) for one in referring)


def _place(one: int, fits: list[list[int]], taken: dict[int, int], tried: set[int]) -> bool:
    """Finds an augmenting path: an expectation may move to another change."""
    for change in fits[one]:
        if change not in tried:
            tried.add(change)
            if change not in taken or _place(taken[change], fits, taken, tried):
                taken[change] = one
                return True
    return False


def _fits(one: Expected, change: Change, ids: NewIds) -> bool:
    if one.table != change.table:
        return False
    match one:
        case InsertedRow(fields=fields, others=others):
            known = others or set(change.after) == set(fields)
            return change.kind is ChangeKind.INSERT and known and _are_met(fields, change.after, ids)
        case UpdatedRow(key=key, fields=fields):
            same = change.kind is ChangeKind.UPDATE and change.key == key
            return same and set(change.fields) <= set(fields) and _are_met(fields, change.after, ids)
        case DeletedRow(key=key):
            return change.kind is ChangeKind.DELETE and change.key == key


def _are_met(fields: JsonMapping, row: JsonMapping, ids: NewIds) -> bool:
    return all(name in row and _is_met(one, row[name], ids) for name, one in fields.items())


def _is_met(one: object, found: object, ids: NewIds) -> bool:
    if isinstance(one, _Free):
        return True
    if isinstance(one, NewRow):
        return ids.get(one.name, found) == found
    return one.fits(found) if isinstance(one, FreeText) else one == found


def _expectation_text(one: Expected) -> str:
    match one:
        case InsertedRow(table=table, fields=fields):
            return f"a new row in {table}: {_listed(fields)}"
        case UpdatedRow(table=table, key=key, fields=fields):
            return f"{table} {_name(key)}: {_listed(fields)}"
        case DeletedRow(table=table, key=key):
            return f"{table} {_name(key)} deleted"


def change_text(change: Change) -> str:
    match change.kind:
        case ChangeKind.INSERT:
            return f"a new row in {change.table}: {_listed(change.after)}"
        case ChangeKind.UPDATE:
            return (
                f"{change.table} {_name(change.key)}: {_listed({name: change.after[name] for name in change.fields})}"
            )
        case ChangeKind.DELETE:
            return f"{change.table} {_name(change.key)} deleted"


def _name(key: tuple[Any, ...]) -> str:
    return "/".join(str(part) for part in key)


def _listed(fields: JsonMapping) -> str:
    shown = ((name, value.wanted if isinstance(value, FreeText) else value) for name, value in fields.items())
    return ", ".join(f"{name} = {value!r}" for name, value in shown)
