"""The process of a task's tests: it runs them, lets the program's process answer each call, and says the verdict."""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from typing import Any

from palestra.environments.benchmarks.plain_values import decode, encode
from palestra.sandbox.compute_only import jail, python_modules

NO_SANDBOX = 77


class ProgramFailed(Exception):
    """The program raised what tests do not expect, or ended."""


class NoPlainData(BaseException):
    """The tests call the program with what cannot cross to it."""


def main() -> None:
    header = json.loads(sys.stdin.buffer.readline())
    python_modules.preload()
    if not jail.enter(header["memory_bytes"], header["cpu_s"]):
        os._exit(NO_SANDBOX)
    _say({"ready": True})
    try:
        setup, tests = (compile(header[part], f"<{part}>", "exec") for part in ("setup", "tests"))
        names: dict[str, Any] = {"__name__": "tests"}
        exec(setup, names)  # noqa: S102 - from the benchmark's file
        for name in [header["function"]] if header["function"] else _unknown(header["tests"], names):
            names[name] = _remote(name)
    except Exception as error:  # boundary: the task is broken, which says nothing about the program
        _say({"broken": f"{type(error).__name__}: {error}"[:500]})
    else:
        _say(_verdict(tests, names))
    os._exit(0)


def _verdict(tests: Any, names: dict[str, Any]) -> dict[str, Any]:
    try:
        exec(tests, names)  # noqa: S102
    except NoPlainData as error:
        return {"broken": str(error)}
    except BaseException as error:  # boundary: the tests' own failure, or the program's
        return {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
    return {"passed": True, "error": None}


def _unknown(tests: str, names: dict[str, Any]) -> list[str]:
    """Names that the tests use and do not define: the program must define them."""
    found = [node for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)]
    made = {node.id for node in found if not isinstance(node.ctx, ast.Load)} | names.keys() | vars(builtins).keys()
    return sorted({node.id for node in found} - made)


def _remote(name: str) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        try:
            given = {"args": encode(list(args)), "named": encode(named)}
        except TypeError as error:
            raise NoPlainData(str(error)) from None
        _say({"call": name, **given})
        answer = json.loads(sys.stdin.buffer.readline())
        if "error" in answer:
            raise _exception(*map(str, answer["error"]))
        return decode(answer["value"])

    return call


def _exception(name: str, text: str) -> Exception:
    """The error that the program has raised, if tests may expect it."""
    found = getattr(builtins, name, None)
    kinds = (ArithmeticError, LookupError, TypeError, ValueError)
    if isinstance(found, type) and issubclass(found, kinds) and not issubclass(found, UnicodeError):
        return found(text)
    return ProgramFailed(f"{name}: {text}".removeprefix(": "))


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
