"""The process of a program that a model wrote: it answers calls of its functions, and knows nothing of any test."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from palestra.environments.benchmarks.plain_values import decode, encode
from palestra.sandbox.compute_only import jail, python_modules

NO_SANDBOX = 77
"""The exit code if the kernel has no sandbox."""


def main() -> None:
    header = json.loads(sys.stdin.buffer.readline())
    python_modules.preload()
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the program prints is dropped
    python_modules.run_threads_at_once()
    if not jail.enter(header["memory_bytes"], header["cpu_s"]):
        os._exit(NO_SANDBOX)
    _say(answers, {"ready": True})
    names: dict[str, Any] = {"__name__": "program"}
    broken = _ran(lambda: exec(compile(header["source"], "<program>", "exec"), names))  # noqa: S102 - it is there for it
    for line in sys.stdin.buffer:
        _say(answers, broken if "error" in broken else _ran(lambda line=line: _called(names, json.loads(line))))
    os._exit(0)


def _called(names: dict[str, Any], call: dict[str, Any]) -> Any:
    if call["call"] not in names:
        raise NameError(f"name {call['call']!r} is not defined")
    return names[call["call"]](*decode(call["args"]), **decode(call["named"]))


def _ran(work: Any) -> dict[str, Any]:
    try:
        return {"value": encode(work())}
    except BaseException as error:  # boundary: whatever the program raises, SystemExit too
        return {"error": [type(error).__name__, str(error)[:500]]}


def _say(pipe: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]
