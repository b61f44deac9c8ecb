"""A process that a run starts for itself."""

from __future__ import annotations

import asyncio
import sys

from palestra.util import own_process
from palestra.util.own_process import own_process as run_process

CHILD = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("It is ready at http://here after 1 s, serving a model (cpu, float32)", flush=True)
sys.stdin.read()
"""


def test_lines_come_from_its_start_until_it_is_ready(tmp_path, monkeypatch):
    """Its own line, with the device, is the last of them."""
    monkeypatch.setattr(own_process, "NOTE_EVERY_S", 0.05)
    may_be_ready, log, said = tmp_path / "now", tmp_path / "server.log", []

    def note(text: str) -> None:
        said.append(text)
        if "is starting" in text:
            may_be_ready.touch()

    async def scenario() -> str:
        command = [sys.executable, "-c", CHILD, str(may_be_ready)]
        async with run_process(command, "ready at ", log, "the server", note, RuntimeError) as address:
            return address

    assert asyncio.run(scenario()) == "http://here"
    assert said[0] == f"starting the server; its log is {log}"
    assert said[1].startswith("the server is starting, ")
    assert said[-1] == "It is ready at http://here after 1 s, serving a model (cpu, float32)"
