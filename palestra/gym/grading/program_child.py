"""The process that runs an untrusted Python program on inputs, in the sandbox.

It imports the standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import signal
import sys
from typing import Any

from palestra.sandbox.compute_only import jail, python_modules
from palestra.util.json_types import JsonObject

MAX_PRINTED = 4 * 1024 * 1024
FILE = "<program>"
NO_SANDBOX = 77
"""The exit code if the kernel has no sandbox."""


class ProgramTimeout(BaseException):
    """The program's time is over. It derives from BaseException, because programs catch Exception."""


def main() -> None:
    header = json.loads(sys.stdin.buffer.readline())
    python_modules.preload()
    answers = os.dup(1)
    os.close(0)
    os.close(1)
    sys.setrecursionlimit(50_000)
    signal.signal(signal.SIGALRM, _out_of_time)
    python_modules.run_threads_at_once()
    if not jail.enter(header["memory_bytes"], header["cpu_s"]) and not header["are_trusted"]:
        os._exit(NO_SANDBOX)
    for given in header["inputs"]:
        outcome = _ran(header["source"], header.get("function"), given, header["test_s"])
        _say(answers, outcome)
        if outcome.get("is_late"):
            break  # it has failed, and would most likely take as long with every other input
    os._exit(0)


def _ran(source: str, function: str | None, given: str, limit_s: float) -> JsonObject:
    """Returns the outcome of one input."""
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogatepass", write_through=True)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        with contextlib.redirect_stdout(printed):
            result = _called(source, function, given) if function else _program(source, given)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return {"printed": _text(printed)[:MAX_PRINTED], "result": result}
    except ProgramTimeout:
        return {"error": f"the program did not end within {limit_s:g} s", "is_late": True}
    except BaseException as error:  # boundary: errors of the program
        signal.setitimer(signal.ITIMER_REAL, 0)
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _program(source: str, given: str) -> None:
    sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
    builtins.input = _input
    builtins.open = _open
    builtins.exit = builtins.quit = sys.exit
    with contextlib.suppress(SystemExit):
        exec(compile(source, FILE, "exec"), {"__name__": "__main__"})  # noqa: S102 - this process is there for it


def _text(printed: io.TextIOWrapper) -> str:
    raw = printed.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode("utf-8", "replace")


def _input(_prompt: object = "") -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError("the input has no more lines")
    return line.rstrip("\n")


def _open(file: Any, mode: str = "r", *_: Any, **__: Any) -> object:
    """Supports the ways in which programs open their input; nothing else can be opened."""
    if file not in (0, "/dev/stdin"):
        raise PermissionError("a program may read only its input, no other file")
    return sys.stdin.buffer if "b" in mode else sys.stdin


def _called(source: str, function: str, given: str) -> Any:
    """Calls the function with one JSON value per line as its arguments. It is a method of `Solution` if there is such a
    class."""
    names: JsonObject = {"__name__": "program"}
    exec(compile(source, FILE, "exec"), names)  # noqa: S102
    found = getattr(names["Solution"](), function, None) if "Solution" in names else names.get(function)
    if found is None:
        raise NameError(f"there is no function {function}")
    result = found(*(json.loads(line) for line in given.splitlines() if line.strip()))
    return json.loads(json.dumps(list(result) if isinstance(result, tuple) else result))


def _out_of_time(*_: object) -> None:
    raise ProgramTimeout


def _say(pipe: int, answer: JsonObject) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]
