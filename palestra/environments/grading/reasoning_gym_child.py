"""The process that scores answers to questions of reasoning-gym. Some generators evaluate an answer as Python, so each
answer is scored in a process of its own that can only compute.

A question has `name`, `args` and `curriculum` of a generator, the index of its entry, and the answer.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import sys
from typing import Any

from palestra.environments.reasoning_gym_datasets import Generator, generators
from palestra.sandbox.compute_only import jail

MEMORY_BYTES = 8 * 1024**3  # address space, of which sympy and numpy reserve some gigabytes
CPU_S = 10
_warm: set[tuple[str, str, int]] = set()


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr  # what generators print is no answer
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(_scored(**json.loads(line))), file=out, flush=True)


def _scored(name: str, settings: str, part: int, entry: str, answer: str) -> dict[str, Any]:
    found = generators(name, settings)[part]
    known = pickle.loads(base64.b64decode(entry))  # noqa: S301 - our own parent made it
    if (name, settings, part) not in _warm:
        found.dataset.score_answer(str(known["answer"]), known)  # imports what can no longer be imported below
        _warm.add((name, settings, part))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _score_in_jail(found, known, answer, write)
    os.close(write)
    with os.fdopen(read) as stream:
        told = stream.read()
    _, status = os.waitpid(child, 0)
    if told:
        return json.loads(told)
    code = os.waitstatus_to_exitcode(status)
    return {"score": 0.0, "error": f"scoring it ended with {signal.Signals(-code).name if code < 0 else code}"}


def _score_in_jail(generator: Generator, entry: Any, answer: str, write: int) -> None:
    """Never returns."""
    try:
        jail.enter(MEMORY_BYTES, CPU_S)
        found: dict[str, Any] = {"score": float(generator.dataset.score_answer(answer, entry))}
    except BaseException as error:  # boundary: the generator cannot read this answer, or the answer tried to leave
        found = {"score": 0.0, "error": f"{type(error).__name__}: {error}"[:500]}
    os.write(write, json.dumps(found).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
