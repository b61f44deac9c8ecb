"""The journal in files where the machine does not help: a full disk, a disk that fails."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.store import FileJournal, JournalError

# A limit on the size of files stands in for a full disk: a write is cut short there, the next one fails.
FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from palestra.store.journal.file_journal import FileJournal
from palestra.store.errors import JournalError

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

async def main():
    async with FileJournal.open(Path(sys.argv[1]), segment_bytes=1000) as journal:
        await journal.append(b"before")
        limit(200)
        outcomes = await asyncio.gather(*(journal.append_soon(b"x" * 100) for _ in range(5)), return_exceptions=True)
        assert [type(o) for o in outcomes] == [JournalError] * 5, outcomes
        assert "cannot write to the journal in" in str(outcomes[0]) and "File too large" in str(outcomes[0])
        await journal.append(b"small fits")
        limit(resource.RLIM_INFINITY)
        for _ in range(10):
            await journal.append(b"y" * 100)      # the segment is full
        limit(5)
        try:
            await journal.append(b"no segment for it")
        except JournalError:
            limit(resource.RLIM_INFINITY)
            position = await journal.append(b"after")
            assert journal.read(position) == b"after"

asyncio.run(main())
"""


def test_full_disk_refuses_appends_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr

    async def run() -> list[bytes]:
        async with FileJournal.open(tmp_path) as journal:
            return [payload for _, payload in journal.recover()]

    assert asyncio.run(run()) == [b"before", b"small fits", *[b"y" * 100] * 10, b"after"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("cut_fails", [False, True])
def test_failed_sync_keeps_nothing_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, cut_fails: bool
) -> None:
    """Also when the file cannot be cut at once: then before the next write."""

    def broken(*_args: object) -> None:
        raise OSError(code, os.strerror(code))

    async def run() -> list[bytes]:
        async with FileJournal.open(tmp_path) as journal:
            await journal.append(b"good")
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", broken)
                if cut_fails:
                    patch.setattr(os, "ftruncate", broken)
                for _ in range(2):
                    with pytest.raises(JournalError, match=os.strerror(code)):
                        await journal.append(b"bad")
            position = await journal.append(b"good again")
            assert journal.read(position) == b"good again"
        async with FileJournal.open(tmp_path) as journal:
            return [payload for _, payload in journal.recover()]

    assert asyncio.run(run()) == [b"good", b"good again"]


def test_segment_that_cannot_be_created_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def run() -> list[bytes]:
        async with FileJournal.open(tmp_path) as journal:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", broken)
                with pytest.raises(JournalError, match="No space left"):
                    await journal.append(b"bad")
            await journal.append(b"good")
        async with FileJournal.open(tmp_path) as journal:
            return [payload for _, payload in journal.recover()]

    assert asyncio.run(run()) == [b"good"]


def test_folder_that_cannot_be_used_is_named() -> None:
    with pytest.raises(JournalError, match="cannot open the journal in /proc/no"):
        FileJournal.open(Path("/proc/no/such"))
