"""Conditions on rollouts, as people type them: `reward<0.2 and stop='length'`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from palestra.util.json_types import JsonMapping
from palestra.util.suggest import nearest

Record = JsonMapping
Value = Callable[[Record], Any]

FIELDS = [
    "id",
    "group",
    "index",
    "task",
    "environment",
    "level",
    "reward",
    "stop",
    "turns",
    "tokens",
    "prompt_tokens",
    "version",
    "temperature",
    "seed",
    "seconds",
    "sample_s",
    "env_s",
    "error",
    "failure",
    "step",
    "attempt",
    "used",
    "advantage",
    "forks",
    "fork_of",
    "fork_turn",
    "not_forked",
]
LONGEST = 1000
ORDER = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
# Quoted text is skipped; elsewhere a single = means ==.
LONE_EQUALS = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?<![<>=!])=(?!=)""")


class WhereError(ValueError):
    """What is wrong with a condition, and how it should look."""


def parse_where(text: str) -> Callable[[Record], bool]:
    if len(text) > LONGEST:
        raise WhereError(f"a condition may have at most {LONGEST} characters; this one has {len(text)}")
    try:
        tree = ast.parse(LONE_EQUALS.sub(lambda found: found[1] or "==", text.strip()), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise WhereError(f"{text!r} is not a condition; write it like: reward<0.2 and stop='length'") from None
    value = _compile(tree.body)
    return lambda record: bool(value(record))


def _compile(node: ast.AST) -> Value:
    match node:
        case ast.BoolOp(op=ast.And(), values=parts):
            compiled = [_compile(part) for part in parts]
            return lambda record: all(part(record) for part in compiled)
        case ast.BoolOp(op=ast.Or(), values=parts):
            compiled = [_compile(part) for part in parts]
            return lambda record: any(part(record) for part in compiled)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            inner = _compile(part)
            return lambda record: not inner(record)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda record: -number
        case ast.Compare():
            return _comparison(node)
        case ast.Constant(value=None | str() | int() | float() as constant):
            return lambda record: constant
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            compiled = [_compile(part) for part in parts]
            return lambda record: [part(record) for part in compiled]
        case ast.Attribute(value=ast.Name(id="metrics"), attr=name):
            return _metric(name)
        case ast.Subscript(value=ast.Name(id="metrics"), slice=ast.Constant(value=str() as name)):
            return _metric(name)
        case ast.Name(id=name):
            return _field(name)
    raise WhereError(
        f"{ast.unparse(node)!r} is not allowed in a condition, which is made of fields, numbers, 'text', "
        "comparisons, in, and, or, not"
    )


def _field(name: str) -> Value:
    name = "environment" if name == "env" else name
    if name not in FIELDS:
        near = nearest(name, FIELDS)
        hint = f"did you mean {near!r}? " if near else ""
        raise WhereError(f"rollouts have no field {name!r}; {hint}Fields: {', '.join(FIELDS)}, metrics.NAME")
    return lambda record: record.get(name)


def _metric(name: str) -> Value:
    return lambda record: (record.get("metrics") or {}).get(name)


def _comparison(node: ast.Compare) -> Value:
    parts = [_compile(part) for part in (node.left, *node.comparators)]
    tests = [_test(op, node) for op in node.ops]

    def holds(record: Record) -> bool:
        values = [part(record) for part in parts]
        return all(test(a, b) for test, a, b in zip(tests, values, values[1:], strict=False))

    return holds


def _test(op: ast.cmpop, node: ast.Compare) -> Callable[[Any, Any], bool]:
    if isinstance(op, ast.Eq):
        return operator.eq
    if isinstance(op, ast.NotEq):
        return operator.ne
    if isinstance(op, ast.In):
        return lambda a, b: _contains(a, b, node)
    if isinstance(op, ast.NotIn):
        return lambda a, b: not _contains(a, b, node)
    if type(op) in ORDER:
        return lambda a, b: _ordered(ORDER[type(op)], a, b, node)
    raise WhereError(f"{ast.unparse(node)!r}: compare with < <= > >= = != in")


def _ordered(test: Callable[[Any, Any], bool], a: object, b: object, node: ast.AST) -> bool:
    """Compares two values. A value that a rollout lacks, such as the reward of a failed one, is neither less nor
    more."""
    if a is None or b is None:
        return False
    try:
        return test(a, b)
    except TypeError:
        raise WhereError(f"{ast.unparse(node)!r} compares a number with text: {a!r} with {b!r}") from None


def _contains(a: Any, b: Any, node: ast.AST) -> bool:
    if (a is None and isinstance(b, str)) or b is None:
        return False
    try:
        return a in b
    except TypeError:
        raise WhereError(f"{ast.unparse(node)!r}: 'in' must be followed by text or a list") from None
