"""Checkpoints: a path leads to a whole checkpoint or to none, also while it is replaced."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from sqlalchemy import Connection

from palestra.store import CheckpointExists, Store
from palestra.store.queries import checkpoints as c
from palestra.store.queries.models import insert_model, is_public, list_models
from palestra.store.queries.sessions import insert_session
from palestra.store.records import (
    CheckpointKey,
    CheckpointKind,
    CheckpointRow,
    CheckpointStatus,
    ModelRow,
    PendingSave,
    SaveCompletion,
    SessionRow,
)
from palestra.types import LoraConfig
from tests.properties import examples

LORA = LoraConfig(rank=4)
KEY = CheckpointKey("m", CheckpointKind.WEIGHTS, "rolling")


def begin(
    store: Store, request: int, *, key: CheckpointKey = KEY, overwrite: bool = False, **fields: object
) -> PendingSave:
    save = PendingSave(
        request_id=f"r{request}",
        model_id=key.model_id,
        kind=key.kind,
        name=key.name,
        seq_id=request,
        folder=f"/{request}",
        created_at=float(request),
    )
    save = msgspec.structs.replace(save, **fields)
    return store.write_now(
        lambda conn: c.begin_checkpoint(conn, save, owner="me", base_model="b", lora=LORA, overwrite=overwrite)
    )


def complete(store: Store, request: int, now: float = 100.0) -> SaveCompletion | None:
    return store.write_now(lambda conn: c.complete_checkpoint(conn, f"r{request}", size_bytes=10, now=now))


def fail(store: Store, request: int) -> PendingSave | None:
    return store.write_now(lambda conn: c.fail_checkpoint(conn, f"r{request}", error="disk full"))


def get(store: Store, key: CheckpointKey = KEY) -> CheckpointRow | None:
    return store.read_now(lambda conn: c.get_checkpoint(conn, key))


def served(store: Store) -> str | None:
    there = get(store)
    return there.folder if there is not None and there.status == CheckpointStatus.COMPLETED else None


def test_a_checkpoint_is_there_when_it_is_complete(tables_store: Store) -> None:
    save = begin(tables_store, 1, ttl_s=60.0, user_metadata={"step": "20"})
    pending = get(tables_store)
    assert pending is not None
    assert pending.status == CheckpointStatus.PENDING
    assert tables_store.read_now(c.saves_under_way) == [save]
    assert tables_store.read_now(c.list_checkpoints).total == 0
    completion = complete(tables_store, 1)
    assert completion is not None
    assert completion.obsolete_folder is None
    assert completion.checkpoint == get(tables_store)
    assert completion.checkpoint == CheckpointRow(
        model_id="m",
        kind=CheckpointKind.WEIGHTS,
        name="rolling",
        owner="me",
        status=CheckpointStatus.COMPLETED,
        folder="/1",
        base_model="b",
        lora=LORA,
        request_id="r1",
        seq_id=1,
        created_at=1.0,
        size_bytes=10,
        user_metadata={"step": "20"},
        completed_at=100.0,
        expires_at=160.0,
    )
    assert completion.checkpoint.key.path == "tinker://m/weights/rolling"
    assert tables_store.read_now(c.saves_under_way) == []


def test_repeated_requests_and_completions_change_nothing(tables_store: Store) -> None:
    first = begin(tables_store, 1)
    assert begin(tables_store, 1, folder="/another") == first
    assert complete(tables_store, 1) is not None
    assert complete(tables_store, 1, now=200.0) is None
    assert fail(tables_store, 1) is None
    assert begin(tables_store, 1, folder="/another").folder == "/1"
    assert served(tables_store) == "/1"
    assert tables_store.read_now(c.saves_under_way) == []


def test_a_taken_name_is_refused_without_overwrite(tables_store: Store) -> None:
    begin(tables_store, 1)
    with pytest.raises(CheckpointExists, match="tinker://m/weights/rolling already exists"):
        begin(tables_store, 2)
    complete(tables_store, 1)
    with pytest.raises(CheckpointExists):
        begin(tables_store, 2)
    begin(tables_store, 2, key=CheckpointKey("m", CheckpointKind.SAMPLER, "rolling"))  # another kind, another name


def test_old_folder_serves_until_the_new_one_is_complete(tables_store: Store) -> None:
    begin(tables_store, 1, user_metadata={"a": "1"}, ttl_s=5.0)
    complete(tables_store, 1)
    tables_store.write_now(lambda conn: c.publish_checkpoint(conn, KEY, public=True))
    begin(tables_store, 2, overwrite=True, user_metadata={"b": "2"})
    assert served(tables_store) == "/1"
    assert tables_store.read_now(c.checkpoint_folders) == {"/1", "/2"}
    completion = complete(tables_store, 2)
    assert completion is not None
    assert completion.obsolete_folder == "/1"
    assert (completion.checkpoint.folder, completion.checkpoint.public) == ("/2", True)
    assert (completion.checkpoint.user_metadata, completion.checkpoint.expires_at) == ({"b": "2"}, None)
    assert tables_store.read_now(c.checkpoint_folders) == {"/2"}


def test_a_failed_save_leaves_what_was_there(tables_store: Store) -> None:
    begin(tables_store, 1)
    assert fail(tables_store, 1) is not None
    failed = get(tables_store)
    assert failed is not None
    assert (failed.status, failed.error) == (CheckpointStatus.FAILED, "disk full")
    begin(tables_store, 2)  # the name is free again
    complete(tables_store, 2)
    begin(tables_store, 3, overwrite=True)
    fail(tables_store, 3)
    assert served(tables_store) == "/2"


@dataclass
class Story:
    """What should be true, kept by hand."""

    served: int | None = None
    under_way: set[int] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(st.tuples(st.sampled_from(["begin", "complete", "fail", "delete"]), st.integers(0, 5))))
def test_overlapping_saves_of_one_name(tables_store: Store, moves: list[tuple[str, int]]) -> None:
    """The latest completed request is served, and every folder is either referred to or was handed back."""

    def clear(conn: Connection) -> None:
        conn.execute(c.saves.delete())
        conn.execute(c.t.delete())

    tables_store.write_now(clear)
    story, number = Story(), 0
    for move, pick in moves:
        if move == "begin":
            number += 1
            begin(tables_store, number, overwrite=True)
            story.under_way.add(number)
            story.folders.add(f"/{number}")
        elif move == "delete":
            gone = tables_store.write_now(lambda conn: c.delete_checkpoint(conn, KEY))
            if story.served is not None:
                assert gone is not None
                assert gone.folder == f"/{story.served}"
                story.folders.discard(gone.folder)
                story.served = None
        elif story.under_way:
            request = sorted(story.under_way)[pick % len(story.under_way)]
            story.under_way.discard(request)
            if move == "fail":
                assert fail(tables_store, request) is not None
                story.folders.discard(f"/{request}")
            else:
                before, story.served = story.served, max(request, story.served or 0)
                completion = complete(tables_store, request)
                assert completion is not None
                dropped = None if before is None else f"/{min(before, request)}"
                assert completion.obsolete_folder == dropped
                story.folders.discard(dropped or "")
        assert served(tables_store) == (None if story.served is None else f"/{story.served}")
        assert {s.seq_id for s in tables_store.read_now(c.saves_under_way)} == story.under_way
        assert story.folders <= tables_store.read_now(c.checkpoint_folders)


def test_expiry_publishing_and_deletion(tables_store: Store) -> None:
    other = CheckpointKey("m", CheckpointKind.SAMPLER, "x")
    begin(tables_store, 1, ttl_s=10.0)
    begin(tables_store, 2, key=other)

    def change(conn: Connection) -> list[bool]:
        return [
            c.set_ttl(conn, KEY, 1.0, now=0.0),  # not there yet
            c.publish_checkpoint(conn, KEY, public=True),
        ]

    assert tables_store.write_now(change) == [False, False]
    complete(tables_store, 1)
    complete(tables_store, 2)
    assert tables_store.read_now(lambda conn: c.expired_checkpoints(conn, 109.9)) == []
    assert [e.name for e in tables_store.read_now(lambda conn: c.expired_checkpoints(conn, 110.0))] == ["rolling"]
    assert tables_store.write_now(lambda conn: c.set_ttl(conn, KEY, None, now=0.0))
    assert tables_store.write_now(lambda conn: c.set_ttl(conn, other, 7.0, now=1.0))
    assert [e.name for e in tables_store.read_now(lambda conn: c.expired_checkpoints(conn, 1e9))] == ["x"]
    deleted = tables_store.write_now(lambda conn: c.delete_checkpoint(conn, KEY))
    assert deleted is not None
    assert deleted.folder == "/1"
    assert tables_store.write_now(lambda conn: c.delete_checkpoint(conn, KEY)) is None
    assert get(tables_store) is None


def test_lists_and_latest(tables_store: Store) -> None:
    for i in range(6):
        key = CheckpointKey(f"m{i % 2}", CheckpointKind.WEIGHTS, f"{i}")
        begin(tables_store, i, key=key)
        complete(tables_store, i)
    begin(tables_store, 6, key=CheckpointKey("m0", CheckpointKind.WEIGHTS, "unfinished"))
    page = tables_store.read_now(lambda conn: c.list_checkpoints(conn, owner="me", limit=2, offset=1))
    assert ([p.name for p in page.items], page.total) == (["4", "3"], 6)
    of_model = tables_store.read_now(lambda conn: c.list_checkpoints(conn, model_id="m1"))
    assert [p.name for p in of_model.items] == ["5", "3", "1"]
    assert tables_store.read_now(lambda conn: c.list_checkpoints(conn, owner="you")).total == 0
    latest = tables_store.read_now(lambda conn: c.last_checkpoints(conn, ["m0", "m1", "m2"]))
    assert {model: p.name for model, p in latest.items()} == {"m0": "4", "m1": "5"}
    assert tables_store.read_now(lambda conn: c.last_checkpoints(conn, ["m0"], CheckpointKind.SAMPLER)) == {}


def test_what_others_may_see(tables_store: Store) -> None:
    def fill(conn: Connection) -> None:
        insert_session(conn, SessionRow(session_id="s", owner="me", created_at=0.0, last_heartbeat_at=0.0))
        for model_id in ("m", "n"):
            model = ModelRow(
                model_id=model_id,
                session_id="s",
                owner="me",
                base_model="b",
                lora=LORA,
                created_at=0.0,
                last_request_at=0.0,
            )
            insert_model(conn, model)

    def seen_by(owner: str, now: float) -> tuple[list[str], list[str]]:
        def look(conn: Connection) -> tuple[list[str], list[str]]:
            models = list_models(conn, owner=owner, public_at=now)
            last = c.last_checkpoints(conn, ["m", "n"], visible_to=owner, alive_at=now)
            assert [m.model_id for m in models.items if is_public(conn, m.model_id, now)] == (
                ["m"] if now < 110 else []
            )
            return [m.model_id for m in models.items], sorted(last)

        return tables_store.read_now(look)

    tables_store.write_now(fill)
    begin(tables_store, 1, ttl_s=10.0)
    begin(tables_store, 2, key=CheckpointKey("n", CheckpointKind.WEIGHTS, "x"))
    complete(tables_store, 1)
    complete(tables_store, 2)
    tables_store.write_now(lambda conn: c.publish_checkpoint(conn, KEY, public=True))
    assert seen_by("me", 105.0) == (["n", "m"], ["m", "n"])
    assert seen_by("you", 105.0) == (["m"], ["m"])
    assert seen_by("you", 110.0) == ([], [])
    alive = tables_store.read_now(lambda conn: c.list_checkpoints(conn, alive_at=110.0))
    assert [p.name for p in alive.items] == ["x"]


def test_copy_is_a_checkpoint_of_its_own(tables_store: Store) -> None:
    target = CheckpointKey("n", CheckpointKind.WEIGHTS, "rolling")

    def copy(request_id: str) -> CheckpointRow | None:
        return tables_store.write_now(
            lambda conn: c.copy_checkpoint(
                conn, KEY, target, owner="you", folder="/copy", request_id=request_id, ttl_s=5.0, now=200.0
            )
        )

    assert copy("k1") is None
    begin(tables_store, 1, user_metadata={"a": "1"})
    assert copy("k1") is None
    complete(tables_store, 1)
    copied = copy("k1")
    assert copied == copy("k1") == get(tables_store, target)
    assert copied is not None
    assert (copied.owner, copied.folder, copied.expires_at, copied.user_metadata) == ("you", "/copy", 205.0, {"a": "1"})
    with pytest.raises(CheckpointExists):
        copy("k2")
    tables_store.write_now(lambda conn: c.delete_checkpoint(conn, KEY))
    assert get(tables_store, target) == copied
