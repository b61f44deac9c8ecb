"""Values that cross the wall between a program and its tests: as JSON, with tags for what JSON does not know.

Only plain data crosses, never an object with code of its own: a result that is equal to everything cannot be made. It
imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any


def encode(value: Any) -> Any:
    """Raises TypeError for a value that cannot cross."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):  # subclasses as what they are made of
        return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
    if isinstance(value, list):
        return [encode(one) for one in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(one)] for key, one in value.items()]}
    for name, (kind, parts, _) in KINDS.items():
        if isinstance(value, kind):
            return {name: [encode(one) for one in parts(value)]}
    raise TypeError(f"a {type(value).__name__} cannot cross between a program and its tests")


def decode(found: Any) -> Any:
    """Raises whatever wrong input makes it raise."""
    if isinstance(found, list):
        return [decode(one) for one in found]
    if not isinstance(found, dict):
        return found
    ((name, parts),) = found.items()
    if name == "dict":
        return {decode(key): decode(one) for key, one in parts}
    return KINDS[name][2]([decode(one) for one in parts])


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "bytes": (bytes, list, bytes),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    "decimal": (Decimal, lambda value: [str(value)], lambda parts: Decimal(*parts)),
    "fraction": (Fraction, lambda value: [value.numerator, value.denominator], lambda parts: Fraction(*parts)),
    "iterator": (Iterator, list, iter),
}
"""For each tag: the kind of value, what it is taken apart into, and how it is made again."""
