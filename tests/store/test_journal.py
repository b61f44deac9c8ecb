"""The journal, wherever it is kept: in order, durable, kept exactly as long as it is held."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.store import DatabaseJournal, FileJournal, Journal, JournalError, Store, StoreError
from palestra.store.journal.open_journal import open_journal
from palestra.store.journal.segments import find_segments
from tests.properties import examples
from tests.store.conftest import DATABASES, new_database

PLACES = ["files", *DATABASES]


@dataclass
class Place:
    """Where a journal is; each call of `open` is another life of the same one."""

    folder: Path
    store: Store | None

    def another(self) -> Place:
        return Place(self.folder / uuid.uuid4().hex, self.store)

    def open(self) -> Journal:
        if self.store is None:
            return FileJournal.open(self.folder)
        return DatabaseJournal.open(self.store, self.folder.name[:16])

    def use(self, work: Callable[[Journal], Awaitable[None]]) -> None:
        async def run() -> None:
            async with self.open() as journal:
                await work(journal)

        asyncio.run(run())

    def recovered(self) -> list[bytes]:
        found: list[bytes] = []

        async def work(journal: Journal) -> None:
            found.extend(payload for _, payload in journal.recover())

        self.use(work)
        return found


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("journal")
    if request.param == "files":
        yield Place(folder, None)
        return
    with new_database(request.param, folder, request) as url, Store.open(url) as store:
        yield Place(folder, store)


@examples(25)
@given(records=st.lists(st.binary(max_size=300), max_size=30), lives=st.integers(1, 3))
def test_what_goes_in_comes_out_in_order(place: Place, records: list[bytes], lives: int) -> None:
    place = place.another()
    for life in range(lives):
        mine = records[life::lives]

        async def use(journal: Journal, mine: list[bytes] = mine) -> None:
            held = dict(journal.recover())
            positions = await asyncio.gather(*(journal.append_soon(record) for record in mine))
            assert [journal.read(position) for position in positions] == mine
            assert all(journal.read(position) == payload for position, payload in held.items())

        place.use(use)
    assert place.recovered() == [record for life in range(lives) for record in records[life::lives]]


def test_what_was_released_is_not_found_in_the_next_life(place: Place) -> None:
    place = place.another()

    async def release(journal: Journal) -> None:
        positions = [await journal.append(bytes([number])) for number in range(5)]
        for position in (*positions[:3], positions[0]):  # twice does no harm
            journal.release(position)
        await journal.append(b"")  # deletions come after appends
        await journal.append(b"")
        if not isinstance(journal, FileJournal):
            with pytest.raises(JournalError, match="was released"):
                journal.read(positions[0])

    place.use(release)
    if place.store is not None:  # files are deleted as a whole
        assert place.recovered() == [b"\3", b"\4", b"", b""]

    async def release_all(journal: Journal) -> None:
        for position, _ in journal.recover():
            journal.release(position)

    place.use(release_all)
    assert place.recovered() == []


def test_cancelled_append_is_held_by_nobody(place: Place) -> None:
    place = place.another()

    async def use(journal: Journal) -> None:
        first = asyncio.create_task(journal.append(b"first"))
        await asyncio.sleep(0)
        first.cancel()
        await journal.append(b"second")
        await asyncio.sleep(0)
        if isinstance(journal, FileJournal):
            assert sum(info.pending for info in journal.segments()) == 1
        else:
            assert journal.size_bytes == len(b"second")

    place.use(use)


def test_closing_writes_what_is_queued_and_refuses_more(place: Place) -> None:
    place = place.another()

    async def run() -> None:
        async with place.open() as journal:
            queued = [journal.append_soon(bytes([i])) for i in range(50)]
        assert len(await asyncio.gather(*queued)) == 50
        with pytest.raises(JournalError, match="closed"):
            journal.append_soon(b"late")

    asyncio.run(run())
    assert place.recovered() == [bytes([i]) for i in range(50)]


def test_a_loop_that_has_gone_does_not_disturb_others(place: Place) -> None:
    place = place.another()

    async def open_and_leave() -> Journal:
        journal = place.open()
        for _ in range(100):
            journal.append_soon(b"nobody waits")
        return journal

    async def go_on(journal: Journal) -> None:
        await journal.append(b"after")
        await journal.close()

    journal = asyncio.run(open_and_leave())
    gc.collect()
    asyncio.run(go_on(journal))
    assert place.recovered()[-1] == b"after"


def test_a_move_to_another_place_and_back_keeps_every_record(store: Store, tmp_path: Path) -> None:
    async def open_in(where: str, *new: bytes) -> list[bytes]:
        opened = await open_journal(where, "requests", tmp_path, store, patience_s=1)  # type: ignore[arg-type]
        async with opened as journal:
            found = [record for _, record in journal.recover()]
            for record in new:
                await journal.append(record)
            return found

    async def run() -> None:
        assert await open_in("files", b"1", b"2") == []
        assert await open_in("database", b"3") == [b"1", b"2"]
        assert not find_segments(tmp_path)
        assert await open_in("database") == [b"1", b"2", b"3"]
        assert await open_in("files", b"4") == [b"1", b"2", b"3"]
        assert await open_in("files") == [b"1", b"2", b"3", b"4"]
        async with DatabaseJournal.open(store, "requests") as left:
            assert list(left.recover()) == []

    asyncio.run(run())


def test_a_database_that_is_away_refuses_appends_and_keeps_nothing_of_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/palestra.db"

    async def run() -> None:
        with Store.open(url) as store:
            async with DatabaseJournal.open(store, "requests") as journal:
                await journal.append(b"good")
                store.write_now(lambda c: c.exec_driver_sql("ALTER TABLE journal_records RENAME TO away"))
                with pytest.raises(JournalError, match=r"the journal in the database: .*no such table"):
                    await journal.append(b"bad")
                store.write_now(lambda c: c.exec_driver_sql("ALTER TABLE away RENAME TO journal_records"))
                position = await journal.append(b"good again")
                assert journal.read(position) == b"good again"
        with Store.open(url) as store:
            async with DatabaseJournal.open(store, "requests") as journal:
                assert [record for _, record in journal.recover()] == [b"good", b"good again"]

    asyncio.run(run())


WRITER = """
import asyncio, itertools, sys
from pathlib import Path
from palestra.store import DatabaseJournal, FileJournal, Store

async def main():
    if sys.argv[1] == "files":
        journal = FileJournal.open(Path(sys.argv[2]), segment_bytes=20_000)
    else:
        journal = DatabaseJournal.open(Store.open(sys.argv[2]), "requests")
    numbers = itertools.count()
    async def client():
        for number in numbers:
            await journal.append(b"%d " % number + bytes(number % 500))
            print(number, flush=True)
    await asyncio.gather(*(client() for _ in range(8)))

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", PLACES)
def test_kill_9_loses_nothing_acknowledged(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with new_database(kind if kind != "files" else "sqlite", tmp_path, request) as url:
        where = str(tmp_path / "journal") if kind == "files" else url
        child = subprocess.Popen([sys.executable, "-c", WRITER, kind, where], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        acknowledged = {int(child.stdout.readline()) for _ in range(500)}
        child.kill()
        acknowledged |= {int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")}
        child.wait()
        child.stdout.close()
        with Store.open(until_free(url)) as store:
            place = Place(tmp_path / "journal", None) if kind == "files" else Place(tmp_path / "requests", store)
            found = {int(payload.split(b" ")[0]) for payload in place.recovered()}
    assert len(acknowledged) >= 500
    assert acknowledged <= found


def until_free(url: str) -> str:
    """PostgreSQL notices a moment later that its client is gone."""
    while True:
        try:
            Store.open(url).close_now()
        except StoreError:
            continue
        return url
