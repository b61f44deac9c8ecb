"""The process of one verifier: reads what to run from its input, enters the sandbox, runs it, answers one line."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import re
import string
import sys
from typing import Any

from palestra.environments.platform.verifiers.runtime import helpers
from palestra.environments.platform.verifiers.runtime.databases import DatabaseSnapshot
from palestra.environments.platform.verifiers.runtime.diffs import IgnoreConfig, SnapshotDiff
from palestra.environments.platform.verifiers.runtime.scores import score_of
from palestra.sandbox.compute_only import jail
from palestra.util.json_types import JsonObject

IMPORTABLE = """
    base64 bisect calendar collections copy dataclasses datetime decimal difflib enum fractions functools hashlib heapq
    html itertools linecache math operator random statistics textwrap time traceback typing unicodedata urllib.parse
    uuid zoneinfo
"""
"""Modules that a verifier may import: they must be loaded before the sandbox closes."""
FLEET_LINES = re.compile(r"^[ \t]*(?:from fleet(?:\.[\w.]+)? import .*|import fleet(?:\.[\w.]+)?)$\n?", re.MULTILINE)
FLEET_DECORATOR = re.compile(r"^@verifier\b(?:\([^)]*\))?[ \t]*\n", re.MULTILINE)
FILE = "<verifier>"
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
MAX_STDOUT = 256 * 1024  # characters
MAX_ERROR = 2000  # characters


class Environment:
    """The argument `env` of a verifier."""

    def __init__(self, seed: DatabaseSnapshot, current: DatabaseSnapshot) -> None:
        self._databases = {"seed": seed, "current": current}
        self._apps: dict[str, Environment] = {}
        self.instance = self

    def load(self) -> None:
        """Does nothing: verifiers call it before they use a database; here it is loaded already."""

    def app(self, name: str) -> Environment:
        """Returns one app of a world of several. Raises KeyError."""
        if name not in self._apps:
            self._apps[name] = Environment(*(self._databases[which].part(name) for which in ("seed", "current")))
        return self._apps[name]

    def db(self, name: str = "current") -> DatabaseSnapshot:
        if name not in self._databases:
            raise KeyError(f"Unknown database '{name}'. Available: {list(self._databases)}")
        return self._databases[name]


class Printed(io.StringIO):
    """Keeps the beginning of what was printed; the rest is dropped."""

    def write(self, text: str) -> int:
        room = MAX_STDOUT - self.tell()
        super().write(text[: max(room, 0)])
        return len(text)


def main() -> None:
    header = json.loads(sys.stdin.buffer.readline())
    seed, current = (sys.stdin.buffer.read(size) for size in header["sizes"])
    for name in IMPORTABLE.split():
        importlib.import_module(name)
    answers = os.dup(1)
    os.close(0)
    os.close(1)
    env = Environment(DatabaseSnapshot(seed, "seed"), DatabaseSnapshot(current, "current"))
    sys.stdout = printed = Printed()
    is_tight = jail.enter(header["memory_bytes"], header["cpu_s"])
    found = {**_outcome(header, env), "stdout": _text(printed.getvalue()), "is_tight": is_tight}
    _answer(answers, json.dumps(found).encode() + b"\n")


def _answer(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]
    os._exit(0)  # no code of the verifier runs after its answer


def _outcome(header: JsonObject, env: Environment) -> JsonObject:
    """Returns the outcome. A failed assertion is a verdict; any other exception of the verifier is none."""
    try:
        function = _function_in(header["source"])
        try:
            result = score_of(_called(function, env, header))
        except AssertionError as error:
            return {"success": True, "result": 0.0, "error": _answer_line(error)}
        return {"success": True, "result": result, "error": ""}
    except BaseException as error:  # also SystemExit: it is the verifier's, not ours
        return {"success": False, "result": None, "error": _answer_line(error)}


def _answer_line(error: BaseException) -> str:
    return _text(f"{type(error).__name__}: {error}"[:MAX_ERROR])


def _text(text: str) -> str:
    """Replaces lone surrogates, because they cannot be encoded."""
    return text.encode(errors="replace").decode()


def _function_in(source: str) -> object:
    """Returns the first function in the source."""
    names = {
        "TASK_SUCCESSFUL_SCORE": helpers.TASK_SUCCESSFUL_SCORE,
        "TASK_FAILED_SCORE": helpers.TASK_FAILED_SCORE,
        "normalized_contains": helpers.normalized_contains,
        "normalized_string_comparison": helpers.normalized_string_comparison,
        "extract_numbers": helpers.extract_numbers,
        "contains_number": helpers.contains_number,
        "DatabaseSnapshot": DatabaseSnapshot,
        "SnapshotDiff": SnapshotDiff,
        "IgnoreConfig": IgnoreConfig,
        "Environment": Environment,
        "json": json,
        "re": re,
        "string": string,
        "__name__": "verifier",
    }
    code = compile(FLEET_DECORATOR.sub("", FLEET_LINES.sub("", source)), FILE, "exec")
    exec(code, names)  # noqa: S102 - this process is there for it
    for found in names.values():
        if inspect.isfunction(found) and found.__code__.co_filename == FILE:
            return found
    raise ValueError("there is no function in the verifier's source")


def _called(function: Any, env: Environment, header: JsonObject) -> Any:
    """Calls it with `env`, the answer if there is a second parameter, and `conversation` wherever that is declared."""
    parameters = [one for one in inspect.signature(function).parameters.values() if one.kind not in VARIADIC]
    given: JsonObject = {}
    for place, one in enumerate(parameters[1:]):
        if one.name == "conversation":
            given[one.name] = header["conversation"]
        elif place == 0:
            given[one.name] = header["final_answer"]
    return function(env, **given) if parameters else function()
