"""Finds out what the code of a server imports, and what it installs by itself when it starts: by its syntax, from the
entrypoint on.

NeMo Gym's folders have set-up code, which runs as the user who started them, in files called `setup_NAME.py`; some have
a command that installs packages in other code. This finds what folders do openly: any code may hide what it does.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STOCK_PACKAGE = "nemo_gym"
_ABSENT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


@dataclass(frozen=True, slots=True)
class CodeImport:
    module: str
    """The absolute name, with dots."""
    name: str | None
    """The name that is imported from the module; None if the module is imported as a whole."""
    file: Path
    line: int
    is_optional: bool
    """Whether the code works without it: it catches the ImportError."""

    @property
    def text(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def imports_of(entrypoint: Path) -> list[CodeImport]:
    """Returns all imports of the file and of the files that it reaches."""
    return [one for own in files_of(entrypoint).values() for one in own]


def files_of(entrypoint: Path) -> dict[Path, list[CodeImport]]:
    """Returns the file and the files that it reaches, with their imports: those in its folder, and those of other
    servers below the same root. `nemo_gym` is never followed: a checkout has it at its root, but a server gets the
    compatibility package."""
    roots = (entrypoint.parent, entrypoint.parent.parents[1])
    found: dict[Path, list[CodeImport]] = {}
    left = [entrypoint]
    while left:
        file = left.pop()
        if file not in found:
            found[file] = list(_read(file, roots[-1]))
            left += (one for each in found[file] if each.package != STOCK_PACKAGE for one in _files(each, roots))
    return found


def parsed(file: Path) -> ast.Module:
    """Parses a file; returns an empty module if it cannot be parsed, because running it will report the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _read(file: Path, root: Path) -> Iterator[CodeImport]:
    for node, is_optional in _walked(parsed(file).body, False):
        if isinstance(node, ast.Import):
            yield from (CodeImport(one.name, None, file, node.lineno, is_optional) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, file, root)
            yield from (CodeImport(module, one.name, file, node.lineno, is_optional) for one in node.names)


def _walked(nodes: Iterable[ast.AST], is_optional: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yields every statement below the nodes that may run, and whether an ImportError there would be caught."""
    for node in nodes:
        if not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            continue
        if isinstance(node, ast.If) and _is_for_type_checkers(node.test):
            yield from _walked(node.orelse, is_optional)
        elif isinstance(node, ast.Try):
            yield from _walked(node.body, is_optional or any(map(_catches_absence, node.handlers)))
            yield from _walked([*node.handlers, *node.orelse, *node.finalbody], is_optional)
        else:
            yield node, is_optional
            yield from _walked(ast.iter_child_nodes(node), is_optional)


def _is_for_type_checkers(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _catches_absence(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(kind) in _ABSENT for kind in kinds)


def _absolute(node: ast.ImportFrom, file: Path, root: Path) -> str:
    if not node.level:
        return node.module or ""
    package = file.relative_to(root).parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _files(one: CodeImport, roots: Sequence[Path]) -> Iterator[Path]:
    """Yields the files of an import below the roots: the module, its parent packages, and the imported name if that is
    a module."""
    parts = [*one.module.split("."), *([one.name] if one.name else [])]
    for root in roots:
        for length in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:length])
            yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


# Set-up code

_FILE = re.compile(r"(setup|install)(_\w+)?\.py")
_INSTALLS = re.compile(
    r"(^|[;&|\n])\s*(sudo |uv |(\S*python[\d.]* )?-m )*(npm|yarn|pnpm|pip3?|apt|apt-get|dnf|yum|apk|brew|conda)"
    r" ((-\S+|tool|global) )*(install|i|add) +\S+"
)


@dataclass(frozen=True, slots=True)
class SetupCode:
    file: Path
    line: int
    what: str
    """Why it counts, in a few words."""


def setup_code(entrypoint: Path) -> list[SetupCode]:
    """Returns the places of set-up code in the files that a server's entrypoint reaches."""
    return [one for file in sorted(files_of(entrypoint)) for one in _found(file)]


def _found(file: Path) -> Iterator[SetupCode]:
    if _FILE.fullmatch(file.name):
        yield SetupCode(file, 1, "by its name")
        return
    nodes = list(ast.walk(parsed(file)))
    docstrings = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.expr) and id(node) not in docstrings and (found := _INSTALLS.search(_command(node))):
            yield SetupCode(file, node.lineno, found[0].strip(" ;&|\n"))


def _command(node: ast.expr) -> str:
    """Returns the text of a node that may be a command: a string, or a list of words."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return " ".join(one.value for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str))
        case _:
            return ""
