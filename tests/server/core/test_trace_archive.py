"""Old traces leave the database for the archive, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import zstandard

from palestra.server.core.trace_archive import ArchivedTrace, TraceArchive
from palestra.store import Store
from palestra.store.queries.traces import Purge, Trace, TraceTurn, TurnFacts, TurnSample, append_turn, list_traces
from palestra.util.object_storage import StorageError

FACTS = TurnFacts(
    response_id="r",
    route="chat",
    base_model="b",
    weights="b",
    temperature=1.0,
    match="new",
    started_at=1.0,
    prepare_s=0.0,
    sample_s=0.0,
    compute_s=0.0,
)
PURGE = Purge(before=100.0, max_turns=100)


def add(store: Store, name: str, at: float) -> None:
    trace = Trace(trace_id=name, owner="o", model="m", created_at=at, updated_at=at)
    sample = TurnSample(tokens=[4, 5], logprobs=[-1.0, -2.0], stop_reason="stop")
    turn = TraceTurn(prompt=[1, 2, 3], samples=[sample], facts=FACTS)
    store.write_now(lambda c: append_turn(c, trace, turn, [1, 2, 3]))


def names(store: Store) -> set[str]:
    return {trace.trace_id for trace in store.read_now(lambda c: list_traces(c, "o", limit=10)).items}


def test_what_is_purged_is_in_the_archive(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        for name, at in (("old", 1.0), ("older", 0.5), ("new", 200.0)):
            add(store, name, at)
        asyncio.run(TraceArchive(store, f"file://{tmp_path}/archive").purge(PURGE))
        assert names(store) == {"new"}
    (file,) = (tmp_path / "archive" / "traces").glob("*/*.jsonl.zst")
    lines = zstandard.ZstdDecompressor().stream_reader(file.read_bytes()).read().splitlines()
    found = {line.trace.trace_id: line for line in (msgspec.json.decode(one, type=ArchivedTrace) for one in lines)}
    assert found.keys() == {"old", "older"}
    (turn,) = found["old"].turns
    assert (turn.prompt, turn.samples[0].tokens, turn.samples[0].logprobs) == ([1, 2, 3], [4, 5], [-1.0, -2.0])


def test_what_cannot_be_archived_stays(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("in the way")
    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        add(store, "old", 1.0)
        with pytest.raises(StorageError):
            asyncio.run(TraceArchive(store, f"file://{tmp_path}/archive").purge(PURGE))
        assert names(store) == {"old"}
