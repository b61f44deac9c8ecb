"""Commands of `palestra` with an environment of their own, which huggingface_hub reads once: a process takes one after
the other, so that what they import is imported once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from msgspec import Struct

SCRIPT = """
import json, os, sys
from click.testing import CliRunner
from palestra.cli import main

for line in sys.__stdin__:
    arguments, environment = json.loads(line)
    done = CliRunner().invoke(main, arguments, env=environment)
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), file=sys.__stdout__, flush=True)
"""


class Done(Struct):
    code: int
    stdout: str
    stderr: str


class CommandProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, *arguments: object, env: Mapping[str, str | None] | None = None) -> Done:
        """`env` is for this command alone; None takes a variable away."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(map(str, arguments)), env]) + "\n")
        self._process.stdin.flush()
        return Done(*json.loads(self._process.stdout.readline()))


@contextmanager
def command_process(**environment: str) -> Iterator[CommandProcess]:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        try:
            yield CommandProcess(process)
        finally:
            process.kill()
