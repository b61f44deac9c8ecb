"""What a server of NeMo Gym's uses without requiring it, because NeMo Gym brings it along.

Owns: which of those packages its code imports and we do not have. Never touches: installing them.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

BROUGHT = {
    "PIL": "pillow",
    "anthropic": "anthropic",
    "datasets": "datasets",
    "devtools": "devtools",
    "git": "GitPython",
    "httpx": "httpx",
    "huggingface_hub": "huggingface_hub",
    "mlflow": "mlflow-skinny",
    "multipart": "python-multipart",
    "numpy": "numpy",
    "openai": "openai",
    "pandas": "pandas",
    "psutil": "psutil",
    "pyarrow": "pyarrow",
    "ray": "ray",
    "requests": "requests",
    "rich": "rich",
    "tenacity": "tenacity",
    "tqdm": "tqdm",
    "wandb": "wandb",
}
"""By the name they are imported under, what to install. NeMo Gym's own requirements and some of theirs."""


def brought_along(entrypoint: Path) -> list[str]:
    """Requirements beyond those that the folder names."""
    found = {name for file in _reached(entrypoint) for name in _imported(file)}
    missing = [name for name in BROUGHT if name in found and importlib.util.find_spec(name) is None]
    return [BROUGHT[name] for name in missing]


def _reached(entrypoint: Path) -> set[Path]:
    """The file and those of its folder, and of other servers below the same root, that it imports."""
    roots = (entrypoint.parent, entrypoint.parent.parents[1])
    reached: set[Path] = set()
    left = [entrypoint]
    while left:
        file = left.pop()
        if file not in reached:
            reached.add(file)
            left += (one for name in _modules(file) for one in _files(name, roots))
    return reached


def _files(module: str, roots: Iterable[Path]) -> Iterator[Path]:
    """Where it is in our roots: the module, and the packages around it."""
    parts = module.split(".")
    for root in roots:
        for length in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:length])
            yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def _imported(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in _modules(file)}


def _modules(file: Path) -> Iterator[str]:
    """All that are imported anywhere in it. A file that is no Python of ours is silent: it will tell when it runs."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = "" if node.level == 0 else f"{_package(file, node.level)}."
            module = f"{above}{node.module or ''}".strip(".")
            yield from (module, *(f"{module}.{alias.name}".strip(".") for alias in node.names))


def _package(file: Path, level: int) -> str:
    """Of a relative import, by its place below the root."""
    folders = file.parts[:-1]
    kept = folders[: len(folders) - (level - 1)]
    kinds = ("resources_servers", "responses_api_agents", "responses_api_models")
    at = next((number for number in reversed(range(len(kept))) if kept[number] in kinds), len(kept))
    return ".".join(kept[at:])
