"""What a server of NeMo Gym's uses without requiring it, because NeMo Gym brings it along.

Owns: which of those packages its code imports and we do not have. Never touches: installing them.
"""

from __future__ import annotations

import importlib.util
import re
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

_IMPORT = re.compile(
    r"""^[ \t]*(?:
        import[ \t]+(?P<plain>[\w., \t]+)
        |from[ \t]+(?P<dots>\.*)(?P<module>[\w.]*)[ \t]+import[ \t]+(?:\((?P<listed>[^)]*)\)|(?P<names>[\w., \t*]+))
    )""",
    re.MULTILINE | re.VERBOSE,
)


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
    """All that are imported anywhere in it, by its lines alone: to parse thousands of them would hold up the gym."""
    for found in _IMPORT.finditer(file.read_text(encoding="utf-8", errors="replace")):
        if found["plain"] is not None:
            yield from (one.split()[0] for one in found["plain"].split(",") if one.strip())
            continue
        dots, module = found["dots"], found["module"]
        above = f"{_package(file, len(dots))}." if dots else ""
        package = f"{above}{module}".strip(".")
        yield package
        listed = re.sub(r"#.*", "", found["listed"] or found["names"])
        yield from (f"{package}.{one.split()[0]}" for one in listed.split(",") if one.strip())


def _package(file: Path, level: int) -> str:
    """Of a relative import, by its place below the root."""
    folders = file.parts[:-1]
    kept = folders[: len(folders) - (level - 1)]
    kinds = ("resources_servers", "responses_api_agents", "responses_api_models")
    at = next((number for number in reversed(range(len(kept))) if kept[number] in kinds), len(kept))
    return ".".join(kept[at:])
