"""Which names of NeMo Gym's a server imports, and whether the stand-in has them.

Owns: the stand-in's names, read from its code; what a server lacks. Never touches: running either.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from palestra.gym.code_imports import STOCK_PACKAGE, CodeImport, imports_of, parsed
from palestra.gym.roots import STAND_IN

_LAZY = "_PUBLIC"
"""In a module whose `__getattr__` imports on demand: `{module: names}`."""


def missing_names(entrypoint: Path) -> list[CodeImport]:
    """Imports of the server, and of what it reaches, that would fail with the stand-in."""
    used = (one for one in imports_of(entrypoint) if one.package == STOCK_PACKAGE and not one.is_optional)
    return [one for one in used if not has_name(one.module, one.name)]


def has_name(module: str, name: str | None) -> bool:
    names = stand_in_names(module)
    return names is not None and (name in (None, "*") or name in names)


@cache
def stand_in_names(module: str) -> frozenset[str] | None:
    """None where the stand-in has no such module."""
    place = STAND_IN.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        return None
    below = (one.stem for one in place.iterdir()) if place.is_dir() else ()
    return frozenset([*_bound(parsed(file).body), *below])


def _bound(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that a module has once it was imported."""
    for one in statements:
        match one:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield one.name
            case ast.Import() | ast.ImportFrom():
                yield from (each.asname or each.name for each in one.names)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict()) if name == _LAZY:
                yield from (each for names in ast.literal_eval(one.value).values() for each in names)
            case ast.Assign() | ast.AnnAssign():
                targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                stored = (each for target in targets for each in ast.walk(target))
                yield from (each.id for each in stored if isinstance(each, ast.Name))
            case ast.If() | ast.Try() | ast.With():
                yield from _bound(each for each in ast.iter_child_nodes(one) if isinstance(each, ast.stmt))
