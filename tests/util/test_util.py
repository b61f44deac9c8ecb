"""Files, locks, children and suggestions that the whole house uses."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.util import processes
from palestra.util.atomic_files import replacing, whole_folder
from palestra.util.locks import FileLock, Locked
from palestra.util.suggest import did_you_mean


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file"
    with replacing(file, mode=0o600) as stream:
        stream.write(b"first")
        assert not file.exists()
    assert file.stat().st_mode & 0o777 == 0o600
    with contextlib.suppress(ZeroDivisionError), replacing(file) as stream:
        stream.write(b"second")
        raise ZeroDivisionError
    assert file.read_bytes() == b"first"
    assert list(file.parent.iterdir()) == [file], "nothing half-written stays"


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), whole_folder(tmp_path / "bad") as folder:
        (folder / "part").write_text("x")
        raise ZeroDivisionError
    with whole_folder(tmp_path / "good") as folder:
        (folder / "part").write_text("x")
    assert list(tmp_path.iterdir()) == [tmp_path / "good"]


def test_a_lock_is_one_processes_and_goes_with_it(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    program = f"""
import pathlib, sys
from palestra.util.locks import FileLock
lock = FileLock(pathlib.Path({str(file)!r}), note=b"me")
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Locked) as error:
            FileLock(file)
        assert error.value.note == b"me"
        other.kill()
    with FileLock(file, note=b"us") as lock, pytest.raises(Locked):
        FileLock(file)
    lock.release(forget=True)
    with FileLock(file):
        assert file.read_bytes() == b""


def test_a_child_ends_with_all_that_it_started() -> None:
    program = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('go', flush=True); time.sleep(600)"

    async def run() -> None:
        child = await processes.spawn(sys.executable, "-c", program, stdout=processes.PIPE)
        assert child.stdout is not None
        await child.stdout.readline()
        await processes.stop(child, 60)
        assert child.returncode == -signal.SIGTERM
        assert await child.stdout.read() == b"", "nobody holds the pipe's other end any more"

    asyncio.run(run())


def test_a_name_that_nobody_knows() -> None:
    assert did_you_mean("gpro", ["grpo", "sft"]) == "did you mean grpo?"
    assert did_you_mean("x", ["grpo", "sft"]) == "there are: grpo, sft"
    assert did_you_mean("x" * 1_000_000, [], otherwise="known") == "known: none"
