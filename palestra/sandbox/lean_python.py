"""Python processes that load one module of ours and nothing that it does not import."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import palestra

SOURCE = Path(palestra.__file__).parent

BOOT = """
import importlib, sys, types
root, module = sys.argv[1:3]
for package in sys.argv[3:]:
    name = ""
    for part in package.split("."):
        path = f"{path}/{part}" if name else root
        name = f"{name}.{part}".lstrip(".")
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [path]
importlib.import_module(module).main()
"""
"""Loads only the module and its neighbours: the packages around them would import what is not needed."""


def command_of(module: str, *packages: str) -> list[str]:
    """Returns the command that runs `main` of the module. `packages` are those that it imports from, beside its own."""
    return [sys.executable, *_arguments(str(SOURCE), module, packages)]


def carried(module: str, *imported: str, folder: str) -> tuple[list[str], dict[str, bytes]]:
    """Returns the same command for a machine or a sandbox that has a Python but not this package, and the files it
    needs, by path below `folder`: those of the module and of all modules of ours that are `imported`."""
    modules = {f"{name.partition('.')[2].replace('.', '/')}.py": name for name in (module, *imported)}
    packages = sorted({name.rpartition(".")[0] for name in imported})
    files = {f"{folder}/{path}": (SOURCE / path).read_bytes() for path in modules}
    return ["python3", *_arguments(folder, module, packages)], files


def _arguments(root: str, module: str, packages: Iterable[str]) -> list[str]:
    return ["-I", "-S", "-c", BOOT, root, module, module.rpartition(".")[0], *packages]
