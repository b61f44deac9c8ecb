"""The program that is process 1 of a sandbox, by itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from palestra.sandbox import first_process
from palestra.util.programs import missing


@pytest.mark.parametrize("machine", first_process.PROGRAMS)
def test_it_says_a_line_and_ends_with_its_input(machine: str, tmp_path: Path) -> None:
    emulator = [] if machine == platform.machine() else [shutil.which(f"qemu-{machine}-static")]
    if None in emulator:
        pytest.skip(str(missing("qemu")))
    program = tmp_path / "first-process"
    program.write_bytes(first_process.executable(machine))
    program.chmod(0o555)
    command = [*map(str, emulator), str(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(1) == b"\n"
        process.stdin.write(b"x" * 1000)
        process.stdin.close()
        assert process.wait() == 0
        assert process.stdout.read() == b""
