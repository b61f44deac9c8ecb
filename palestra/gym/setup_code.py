"""Set-up code of a stock server: what it installs by itself when it starts, as the user who started it.

Owns: finding it, by its syntax. Never touches: running it.

NeMo Gym's folders have such code in files called `setup_NAME.py`; some have a command that installs packages in other
code. This finds what folders do openly: any code of a folder runs as the user, and may hide what it does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from palestra.gym.code_imports import files_of, parsed

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
