"""palestra sandbox: the status and the output of a command are its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from palestra.cli.output import INTERRUPTED
from palestra.sandbox import backend
from tests.cli.tree import palestra
from tests.sandbox.needs import needs_local


def test_every_backend_is_listed_with_what_is_missing() -> None:
    found = {one["name"]: one["problem"] for one in json.loads(palestra("sandbox", "list", "--json").stdout)}
    assert set(found) >= {"local", "docker", "podman", "ssh", "ray"}
    assert found["local"] == backend("local").problem()


@needs_local
def test_a_command_runs_behind_the_wall() -> None:
    done = palestra("sandbox", "run", "-e", "A=1", "--", "sh", "-c", "echo $A; echo no >&2; ls /root; exit 4")
    assert (done.exit_code, done.stdout) == (4, "1\n")
    assert "no\n" in done.stderr


@needs_local
def test_a_secret_comes_in_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value on the command line could be read by everybody on the machine."""
    monkeypatch.setenv("MY_KEY", "a-key")
    assert palestra("sandbox", "run", "-e", "MY_KEY", "--", "sh", "-c", "echo $MY_KEY").stdout == "a-key\n"


@needs_local
def test_what_is_wrong_is_said_in_a_line() -> None:
    assert "did you mean local" in palestra("sandbox", "run", "--sandbox", "lokal", "--", "true").stderr
    assert palestra("sandbox", "run", "--env", "A", "--", "true").exit_code == 2
    assert "took longer" in palestra("sandbox", "run", "--timeout", "0.3", "--", "sleep", "9").stderr


@needs_local
def test_output_is_printed_as_it_comes_and_ctrl_c_removes_the_sandbox() -> None:
    mark = f"palestra-ctrl-c-{os.getpid()}"
    command = [
        sys.executable,
        "-m",
        "palestra",
        "sandbox",
        "run",
        "-e",
        f"MARK={mark}",
        "--",
        "sh",
        "-c",
        "echo first; sleep 999",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        inside = [one for one in psutil.process_iter() if _has_mark(one, mark)]
        assert inside
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in errors
    assert not any(one.is_running() for one in inside)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("MARK") == mark
    except (psutil.Error, OSError):
        return False
