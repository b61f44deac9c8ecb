"""The last numbers that clients were told are safe: known after a kill, and believed only when they are whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.store.journal.acknowledged import AcknowledgedRequests

WRITER = """
import os, signal, sys
from pathlib import Path
from palestra.store.journal.acknowledged import AcknowledgedRequests

known = AcknowledgedRequests(Path(sys.argv[1]))
for number in range(1000):
    for name in "abc":
        known.note(name, number)
known.forget("b")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "acknowledged"


def last(file: Path, *names: str) -> list[int]:
    known = AcknowledgedRequests(file)
    try:
        return [known.last(name) for name in names]
    finally:
        known.close()


def test_kill_9_forgets_nothing(file: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITER, str(file)], check=False, timeout=60)
    assert last(file, "a", "b", "c", "d") == [999, -1, 999, -1]


def test_it_never_goes_back_and_the_place_of_a_model_that_left_is_used_again(file: Path) -> None:
    known = AcknowledgedRequests(file)
    for number in range(100):
        known.note(f"model {number}", 5)
        known.note(f"model {number}", 3)
        if number:
            known.forget(f"model {number - 1}")
    assert file.stat().st_size <= 2 * 128
    known.note("absent", 7)
    known.forget_all_but({"model 99"})
    known.close()
    assert last(file, "model 99", "model 98", "absent") == [5, -1, -1]


def test_what_is_torn_is_not_believed(file: Path) -> None:
    known = AcknowledgedRequests(file)
    for name in "abc":
        known.note(name, 1 << 40)
    known.close()
    data = bytearray(file.read_bytes())
    data[128 + 6] ^= 1
    file.write_bytes(data[:-1])
    assert last(file, "a", "b", "c") == [1 << 40, -1, -1]


def test_a_disk_that_takes_nothing_is_no_error(file: Path) -> None:
    known = AcknowledgedRequests(file)
    known.note("a", 1)
    os.close(known._fd)
    known._fd = os.open(file, os.O_RDONLY)
    known.note("a", 2)
    known.close()
    assert last(file, "a") == [1]
