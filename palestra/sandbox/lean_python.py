"""Python processes that load one module of ours and nothing that it does not import.

Owns: their command line. Never touches: what they do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import palestra

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
    root = str(Path(palestra.__file__).parent)
    return [sys.executable, "-I", "-S", "-c", BOOT, root, module, module.rpartition(".")[0], *packages]
