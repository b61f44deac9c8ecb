"""The journal in files: whole or absent, deleted when nothing in them is held. `test_journal` has what holds in any
place."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.store import FileJournal, JournalError, Position
from palestra.store.journal.segments import HEADER, PREFIX_BYTES
from tests.properties import examples


def with_journal(folder: Path, use: Callable[[FileJournal], Awaitable[None]], segment_bytes: int = 1 << 20) -> None:
    async def run() -> None:
        async with FileJournal.open(folder, segment_bytes=segment_bytes) as journal:
            await use(journal)

    asyncio.run(run())


def write(folder: Path, *records: bytes, segment_bytes: int = 1 << 20) -> list[Position]:
    positions: list[Position] = []

    async def use(journal: FileJournal) -> None:
        positions.extend([await journal.append(record) for record in records])

    with_journal(folder, use, segment_bytes)
    return positions


def recovered(folder: Path) -> list[bytes]:
    found: list[bytes] = []

    async def use(journal: FileJournal) -> None:
        found.extend(payload for _, payload in journal.recover())

    with_journal(folder, use)
    return found


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@examples(25)
@given(
    records=st.lists(st.binary(max_size=300), max_size=30), segment_bytes=st.integers(1, 2000), lives=st.integers(1, 3)
)
def test_what_goes_in_comes_out_in_order(records: list[bytes], segment_bytes: int, lives: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for life in range(lives):
            mine = records[life::lives]

            async def use(journal: FileJournal, mine: list[bytes] = mine) -> None:
                held = dict(journal.recover())
                positions = await asyncio.gather(*(journal.append_soon(record) for record in mine))
                assert [journal.read(position) for position in positions] == mine
                assert all(journal.read(position) == payload for position, payload in held.items())
                assert positions == sorted(positions, key=lambda p: (p.segment, p.offset))
                assert journal.size_bytes == bytes_in(folder)

            with_journal(folder, use, segment_bytes)
        assert recovered(folder) == [record for life in range(lives) for record in records[life::lives]]


def test_concurrent_appends_share_an_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = 0
    fdatasync = os.fdatasync

    def counted(fd: int) -> None:
        nonlocal syncs
        syncs += 1
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", counted)

    async def use(journal: FileJournal) -> None:
        async def client(number: int) -> None:
            for i in range(20):
                record = f"{number}-{i}".encode()
                assert journal.read(await journal.append(record)) == record

        await asyncio.gather(*(client(number) for number in range(100)))

    with_journal(tmp_path, use)
    assert syncs < 1000
    found = [record.decode().split("-") for record in recovered(tmp_path)]
    for number in range(100):
        assert [int(i) for n, i in found if n == str(number)] == list(range(20))


@pytest.mark.parametrize("records", [[b"first", b"second", b"the last one"], [b"", b"", b""], [b"alone"]])
def test_torn_tail_is_cut_wherever_the_crash_was(tmp_path: Path, records: list[bytes]) -> None:
    last = write(tmp_path / "whole", *records)[-1]
    whole = (tmp_path / "whole" / "000000000001.journal").read_bytes()
    for cut in range(last.offset, len(whole)):
        for tail in (b"", b"\0" * 50):  # a power cut may leave zeros in place of what was written
            if whole[cut:].startswith(tail[: len(whole) - cut]) and len(whole) - cut <= len(tail):
                continue  # the zeros are the record's own
            folder = tmp_path / f"{cut}-{len(tail)}"
            folder.mkdir()
            (folder / "000000000001.journal").write_bytes(whole[:cut] + tail)
            write(folder, b"new")
            assert recovered(folder) == [*records[:-1], b"new"]


@pytest.mark.parametrize("size", range(len(HEADER)))
def test_segment_that_was_being_created_is_dropped(tmp_path: Path, size: int) -> None:
    write(tmp_path, b"kept")
    (tmp_path / "000000000002.journal").write_bytes(HEADER[:size])
    write(tmp_path, b"new")
    assert recovered(tmp_path) == [b"kept", b"new"]


def test_damage_elsewhere_is_named(tmp_path: Path) -> None:
    positions = write(tmp_path, b"aaaa", b"bbbb", b"cccc", segment_bytes=len(HEADER) + 1)
    assert files(tmp_path) == [f"{n:012d}.journal" for n in (1, 2, 3)]
    second = tmp_path / "000000000002.journal"
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    with pytest.raises(JournalError, match=rf"{second} is damaged at byte {positions[1].offset}"):
        recovered(tmp_path)
    second.write_bytes(b"something else, long enough")
    with pytest.raises(JournalError, match=rf"{second} is damaged at byte 0"):
        recovered(tmp_path)


def test_a_foreign_last_file_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "000000000001.journal"
    file.write_bytes(b"something else, long enough")
    with pytest.raises(JournalError, match="not the header"):
        FileJournal.open(tmp_path)
    assert file.read_bytes() == b"something else, long enough"


def test_reading_checks_what_it_reads(tmp_path: Path) -> None:
    async def use(journal: FileJournal) -> None:
        position = await journal.append(b"payload")
        file = tmp_path / "000000000001.journal"
        content = bytearray(file.read_bytes())
        content[position.offset + PREFIX_BYTES] ^= 1
        file.write_bytes(content)
        with pytest.raises(JournalError, match="damaged at byte"):
            journal.read(position)

    with_journal(tmp_path, use)


@examples(25)
@given(data=st.data(), sizes=st.lists(st.integers(0, 60), min_size=1, max_size=30))
def test_segments_live_exactly_while_something_in_them_is_held(data: st.DataObject, sizes: list[int]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)

        async def use(journal: FileJournal) -> None:
            held = dict(journal.recover())
            for size in sizes:
                position = await journal.append(bytes(size))
                held[position] = bytes(size)
                for position in data.draw(st.lists(st.sampled_from(sorted(held, key=lambda p: (p.segment, p.offset))))):
                    held.pop(position, None)
                    journal.release(position)
                    journal.release(position)
            last = await journal.append(b"last")
            held[last] = b"last"
            await journal.append(b"")  # a group's deletions come after its appends
            needed = {position.segment for position in held} | {info.segment for info in journal.segments()[-1:]}
            assert files(folder) == sorted(f"{n:012d}.journal" for n in needed)
            assert {info.segment: info.pending for info in journal.segments() if info.pending}.keys() >= {last.segment}
            assert all(journal.read(position) == payload for position, payload in held.items())

        with_journal(folder, use, segment_bytes=100)
        with_journal(folder, use, segment_bytes=100)  # the second life holds what the first left behind


def test_recovered_segments_wait_for_recovery_and_go_when_released(tmp_path: Path) -> None:
    write(tmp_path, *[b"x" * 50] * 6, segment_bytes=100)
    before = files(tmp_path)

    async def use(journal: FileJournal) -> None:
        await journal.append(b"new")
        assert set(before) < set(files(tmp_path))
        count = 0
        for position, _ in journal.recover():  # released while its segment is still being read
            journal.release(position)
            count += 1
        assert count == 6
        await journal.append(b"")
        await journal.append(b"")  # a group's deletions come after its appends
        assert not set(before) & set(files(tmp_path))
        assert list(journal.recover()) == []
        (info,) = journal.segments()
        assert (info.pending, info.oldest_held) == (3, Position(info.segment, len(HEADER), 3))
        with pytest.raises(JournalError, match="was deleted"):
            journal.read(Position(1, len(HEADER), 50))

    with_journal(tmp_path, use)
