"""Launchers for programs that need nothing of their node but its Python and its environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from palestra.placement.process import ProcessCommand, Report


class PythonLauncher:
    """Runs a module with the node's Python, in the node's environment with some variables more."""

    answer = None

    def __init__(self, argument: bytes) -> None:
        self._module, self._environment = json.loads(argument)

    async def command(self, report: Report) -> ProcessCommand:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | self._environment
        return ProcessCommand([sys.executable, "-m", self._module], environment)


PYTHON = f"{PythonLauncher.__module__}:{PythonLauncher.__name__}"


def python_argument(module: str, environment: Mapping[str, str]) -> bytes:
    return json.dumps([module, dict(environment)]).encode()
