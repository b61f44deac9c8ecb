"""The compatibility package for NeMo Gym: where it is, which names it has, and which of them a server lacks.

The compatibility package is a distribution of its own. A clone has it below `integrations`, our wheel beside
`palestra`; both under a private name, so that `import nemo_gym` finds an installed NeMo Gym everywhere but
in the processes of stock servers.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from palestra.gym.server_code import STOCK_PACKAGE, CodeImport, imports_of, parsed

_ROOT = Path(__file__).parents[2]
_PLACES = (_ROOT / "palestra_nemo_gym", _ROOT / "integrations/palestra_nemo_gym")
COMPAT = next((place for place in _PLACES if place.is_dir()), _PLACES[-1])
"""What `import nemo_gym` finds in a stock server's process."""
_LAZY = "_PUBLIC"
"""In a module whose `__getattr__` imports on demand: `{module: names}`."""


def stock_path(folder: Path) -> str:
    """Returns a stock server's `PYTHONPATH`: the compatibility package, its folder and the root of that, then whatever
    was set."""
    path = [str(COMPAT), str(folder), str(folder.parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(one for one in path if one)


def missing_names(entrypoint: Path) -> list[CodeImport]:
    """Returns imports of the server, and of what it reaches, that would fail with the compatibility package."""
    used = (one for one in imports_of(entrypoint) if one.package == STOCK_PACKAGE and not one.is_optional)
    return [one for one in used if not has_name(one.module, one.name)]


def has_name(module: str, name: str | None) -> bool:
    names = compat_names(module)
    return names is not None and (name in (None, "*") or name in names)


@cache
def compat_names(module: str) -> frozenset[str] | None:
    """Returns the names of a module; None if the compatibility package has no such module."""
    place = COMPAT.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        return None
    below = (one.stem for one in place.iterdir()) if place.is_dir() else ()
    return frozenset([*_bound(parsed(file).body), *below])


def _bound(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yields the names that a module has after its import."""
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


PROVIDED = {
    "PIL": "pillow",
    "anthropic": "anthropic",
    "datasets": "datasets",
    "devtools": "devtools",
    "git": "GitPython",
    "httpx": "httpx",
    "huggingface_hub": "huggingface_hub",
    "jinja2": "jinja2",
    "mlflow": "mlflow-skinny",
    "multipart": "python-multipart",
    "numpy": "numpy",
    "openai": "openai",
    "pandas": "pandas",
    "psutil": "psutil",
    "pyarrow": "pyarrow",
    "pydot": "pydot",
    "ray": "ray",
    "requests": "requests",
    "rich": "rich",
    "scipy": "scipy",
    "tenacity": "tenacity",
    "tqdm": "tqdm",
    "wandb": "wandb",
}
"""What to install, by import name: NeMo Gym's own requirements and some of theirs."""


def provided_packages(entrypoint: Path) -> list[str]:
    """Returns requirements in addition to those that the folder names."""
    found = {one.package for one in imports_of(entrypoint)}
    missing = [name for name in PROVIDED if name in found and importlib.util.find_spec(name) is None]
    return [PROVIDED[name] for name in missing]
