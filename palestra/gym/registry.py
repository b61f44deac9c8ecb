"""Finds the code of a server: a folder below the roots, Palestra's or NeMo Gym's."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from palestra.gym.errors import GymConfigError
from palestra.gym.records import ServerInstance, ServerKind
from palestra.gym.search_folders import SHIPPED, did_you_mean
from palestra.gym.servers.base import GymServer

OURS = {
    ServerKind.AGENT: ("simple_agent", "gymnasium_agent", "remote_agent"),
    ServerKind.MODEL: ("vllm_model", "openai_model"),
    ServerKind.ENVIRONMENT: ("legacy_agent",),
}
"""Implementations that are ours even if a folder of that name is nearer, unless `gym.use_stock` names them."""

_OURS = re.compile(r"^\s*(?:from|import)\s+palestra\b", re.MULTILINE)
_STOCK = re.compile(
    r"^\s*(?:from|import)\s+(?:nemo_gym|resources_servers|environment_servers|responses_api_\w+)\b", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Implementation:
    folder: Path | None
    is_stock: bool


def locate(
    kind: ServerKind, implementation: str, entrypoint: str, roots: Sequence[Path], use_stock: Sequence[str]
) -> Implementation:
    """Finds a server's code. Raises GymConfigError if no root has it."""
    is_ours = implementation in OURS.get(kind, ()) and implementation not in use_stock
    searched = [SHIPPED] if is_ours else list(roots)
    if implementation in use_stock:
        searched = [root for root in roots if root != SHIPPED]
    for root in searched:
        folder = root / kind / implementation
        if (folder / entrypoint).is_file():
            return Implementation(folder, is_stock=not is_ours and is_stock(folder / entrypoint))
    places = "".join(f"\n  not at {root / kind / implementation / entrypoint}" for root in searched)
    near = did_you_mean(implementation, implementations(kind, searched))
    raise GymConfigError(f"there is no server {kind}/{implementation}{places}{near}")


def implementations(kind: ServerKind, roots: Sequence[Path]) -> list[str]:
    folders = (folder for root in roots if (root / kind).is_dir() for folder in (root / kind).iterdir())
    return sorted({folder.name for folder in folders if any(folder.glob("*.py"))})


def is_stock(entrypoint: Path) -> bool:
    """Whether it, or a file beside it, imports NeMo Gym or another of its servers; and it does not import Palestra."""
    if _OURS.search(_text(entrypoint)):
        return False
    return any(_STOCK.search(_text(file)) for file in {entrypoint, *entrypoint.parent.glob("*.py")})


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def load_class(instance: ServerInstance) -> type[GymServer]:
    """Returns the server class of its entrypoint. Raises GymConfigError if there is none, or more than one."""
    module = _load_module(instance)
    chosen = getattr(module, "SERVER", None)
    found = [chosen] if chosen is not None else _classes(module)
    fitting = [one for one in found if getattr(one, "kind", None) is instance.kind]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(one.__name__ for one in fitting) or "none"
    raise GymConfigError(
        f"{module.__file__}: should define one server class of kind {instance.kind}, but has {names}; with "
        "several, name one: SERVER = TheClass"
    )


def _classes(module: ModuleType) -> list[type[GymServer]]:
    own = [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, GymServer)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    return [one for one in own if not any(other is not one and issubclass(other, one) for other in own)]


def _load_module(instance: ServerInstance) -> ModuleType:
    folder = instance.folder
    assert folder is not None, f"{instance.name} was loaded without its code"
    file = folder / instance.settings["entrypoint"]
    if SHIPPED in file.parents and ".." not in file.parts:
        below = file.relative_to(SHIPPED).with_suffix("")
        return importlib.import_module(".".join(("palestra.gym.shipped", *below.parts)))
    return _load_file(file, f"palestra_gym_{instance.kind}_{instance.implementation}")


def _load_file(file: Path, package: str) -> ModuleType:
    """Loads a file as a module of its own package: files beside it are imported by `from .name import …`, so that two
    servers in one process may each have a `checks.py`."""
    name = f"{package}.{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    above = ModuleType(package)
    above.__path__ = [str(file.parent)]
    sys.modules.setdefault(package, above)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # a half-loaded module must not be found again
        del sys.modules[name]
        raise
    return module
