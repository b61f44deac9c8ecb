"""The broker's small parts: its clock, its keys, its writes, its lines of those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.redaction import redact
from palestra.server.broker import attempt_keys as key_module
from palestra.server.broker.attempt_keys import EpisodeKeys
from palestra.server.broker.board_writer import BoardWriter, NotSaved
from palestra.server.broker.clock import MOST_S, Clock
from palestra.server.broker.deliveries import played_turns
from palestra.server.broker.signals import NamedEvents
from palestra.server.broker.waiting_claims import PassedOver, Waiter, WaitingClaims
from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import AttemptRef
from palestra.server.http.json_records import record_of
from palestra.store import Store
from palestra.store.queries.traces import Trace, TraceTurn, TurnFacts, TurnKey, TurnSample, append_turn, note_unanswered
from palestra.types.episodes import NewGroup


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


# Time


def test_setting_the_systems_clock_changes_nothing() -> None:
    wall, steady = [1000.0], [5.0]
    clock = Clock(lambda: wall[0], lambda: steady[0])
    for change in (3600.0, -7200.0):
        before = clock.now()
        wall[0] += change
        steady[0] += 0.5
        assert clock.now() == before + 0.5


def test_time_in_which_nobody_could_be_heard_does_not_count() -> None:
    steady = [0.0]
    clock = Clock(lambda: 1000.0, lambda: steady[0])
    steady[0] += 8 * 3600
    assert clock.now() == 1000.0 + MOST_S


def test_a_clock_that_was_set_back_between_two_starts_goes_on_where_it_was() -> None:
    clock = Clock(lambda: 1000.0, lambda: 0.0)
    clock.begin_after(5000.0)
    assert clock.now() == 5000.0
    clock.begin_after(10.0)
    assert clock.now() == 5000.0


# Keys

ATTEMPT = AttemptRef("alice", "e-1", 1)


def test_a_key_is_the_same_after_a_restart_and_another_for_everything_else() -> None:
    keys = EpisodeKeys("secret")
    assert EpisodeKeys("secret").make(ATTEMPT) == keys.make(ATTEMPT)
    others = [AttemptRef("bob", "e-1", 1), AttemptRef("alice", "e-2", 1), AttemptRef("alice", "e-1", 2)]
    made = {keys.make(ATTEMPT), EpisodeKeys("other").make(ATTEMPT), *map(keys.make, others)}
    assert len(made) == 5
    assert redact(f"it was {keys.make(ATTEMPT)}.") == "it was [redacted]."


def test_a_void_key_is_known_for_a_while_and_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "MAX_VOID", 2)
    keys = EpisodeKeys("secret")
    assert keys.find(keys.make(ATTEMPT)) is None
    key = keys.open(ATTEMPT)
    assert (keys.find(key), keys.is_live(ATTEMPT)) == (ATTEMPT, True)
    keys.void(ATTEMPT)
    assert (keys.find(key), keys.is_live(ATTEMPT)) == (ATTEMPT, False)
    for number in (2, 3):
        keys.void(AttemptRef("alice", "e-1", number))
    assert keys.find(key) is None
    assert keys.find("ep-\ud800") is None


# Writes


class Disk:
    """Slow, and full when told so."""

    def __init__(self) -> None:
        self.changes: list[int] = []
        self.kept: list[list[int]] = []
        self.is_full = False
        self.failures = 0
        self.go_on = asyncio.Event()
        self.saving = BoardWriter(self.write, self.on_failure)

    async def write(self) -> None:
        taken, self.changes = self.changes, []
        await self.go_on.wait()
        if self.is_full:
            raise OSError("full")
        self.kept.append(taken)

    def on_failure(self, error: BaseException) -> None:
        self.failures += 1
        self.changes = []

    async def change(self, number: int) -> int:
        self.changes.append(number)
        self.saving.touch()
        await self.saving.saved()
        return number


def test_what_happens_during_a_write_is_the_next_one() -> None:
    async def work() -> None:
        disk = Disk()
        first = asyncio.create_task(disk.change(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        rest = [asyncio.create_task(disk.change(number)) for number in (2, 3)]
        await asyncio.sleep(0)
        rest[0].cancel()  # its client left: what was changed is changed
        assert not first.done()
        disk.go_on.set()
        assert await asyncio.gather(first, rest[1]) == [1, 3]
        assert disk.kept == [[1], [2, 3]]
        await disk.saving.settle_down()
        await disk.saving.saved()

    run(work())


def test_what_stands_on_a_failed_write_fails_with_it() -> None:
    async def work() -> None:
        disk = Disk()
        first = asyncio.create_task(disk.change(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second = asyncio.create_task(disk.change(2))
        await asyncio.sleep(0)
        disk.is_full = True
        disk.go_on.set()
        response = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(one) for one in response] == [NotSaved, NotSaved]
        assert isinstance(response[0], Refusal)
        assert (response[0].status, response[0].retry_after_s) == (503, 1.0)
        assert (disk.kept, disk.failures) == ([], 1)
        disk.is_full = False
        assert await disk.change(3) == 3
        assert disk.kept == [[3]]

    run(work())


# Lines

Asked = tuple[str, int, bool]
"""What, how many at most, and whether it may have any."""


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans()), max_size=12), st.data())
def test_lines_are_served_in_turn(asked: list[Asked], data: st.DataObject) -> None:
    """Whoever gets something has waited longest of those who could."""

    async def work() -> None:
        waiting: WaitingClaims[Asked, list[str]] = WaitingClaims()
        waiters = [waiting.join(one, (one[0],), (str(n),)) for n, one in enumerate(asked)]
        for waiter in data.draw(st.lists(st.sampled_from(waiters), unique_by=id)) if waiters else []:
            waiting.begin_shutdown(waiter)
        left = [waiter for waiter in waiters if waiter.readers]
        assert len(waiting) == len(left)
        stock = data.draw(st.dictionaries(st.sampled_from("abc"), st.integers(0, 6)))
        served: list[int] = []

        def take(waiter: Waiter[Asked, list[str]]) -> list[str] | PassedOver | None:
            what, most, is_free = waiter.request
            if stock.get(what) and not is_free:
                return PassedOver()
            got = min(most, stock.get(what, 0))
            stock[what] = stock.get(what, 0) - got
            served.extend([waiter.number] * bool(got))
            return [what] * got or None

        waiting.hand_out(take, lambda line: line != "c")
        assert served == sorted(served)
        for line in "ab":
            states = [waiter.got.done() for waiter in left if waiter.request[0] == line and waiter.request[2]]
            assert states == sorted(states, reverse=True), "somebody was passed over"
            assert not stock.get(line) or all(states)
        assert len(waiting) == len(left) - len(served)
        for waiter in waiters:
            assert not (waiter.got.done() and (waiter.request[0] == "c" or not waiter.request[2] or not waiter.readers))

    run(work())


def test_a_signal_wakes_those_of_its_name() -> None:
    async def work() -> None:
        signals = NamedEvents()
        waits = [asyncio.create_task(signals.wait(name, 5)) for name in ("a", "a", "b")]
        await asyncio.sleep(0)
        signals.wake("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [one.done() for one in waits] == [True, True, False]
        signals.wake_all()
        assert await asyncio.gather(*waits) == [True] * 3
        assert await signals.wait("a", 0) is False
        assert not signals._waiting

    run(work())


# Turns of an attempt


def test_a_clock_that_was_set_back_between_two_calls_changes_no_trajectory(tmp_path: Path) -> None:
    first, second = [1, 2], [1, 2, 3, 4]
    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        keep(store, "long", turn(first, 3, at=5000.0))
        keep(store, "long", turn(second, 5, at=100.0, parent=0))
        keep(store, "other", turn([7], 8, at=200.0))
        turns = store.read_now(lambda conn: played_turns(conn, "alice", "e#1"))
    assert [one.turn.prompt for one in turns] == [[7], first, second]


@pytest.mark.parametrize(("then", "seen"), [([], 1), ([[1, 2]], 1), ([[1, 2, 3, 4]], 2), ([[9]], 2)])
def test_what_was_not_answered_is_left_out_where_it_was_asked_for_again(
    tmp_path: Path, then: list[list[int]], seen: int
) -> None:
    """And nobody went on from it: then it was seen."""
    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        lost = keep(store, "a", turn([1, 2], 3, at=1.0))
        store.write_now(lambda conn: note_unanswered(conn, [lost]))
        for number, prompt in enumerate(then):
            keep(store, f"later-{number}", turn(prompt, 9, at=2.0))
        turns = store.read_now(lambda conn: played_turns(conn, "alice", "e#1"))
    assert len(turns) == seen
    assert (lost.trace_id in {one.trace_id for one in turns}) == (then != [[1, 2]])


def keep(store: Store, name: str, one: TraceTurn) -> TurnKey:
    trace = Trace(trace_id=name, owner="alice", model="m", created_at=1.0, updated_at=1.0, origin="e#1")
    read = one.prompt if one.parent is None else one.prompt[-1:]
    return store.write_now(lambda conn: append_turn(conn, trace, one, read))


def turn(prompt: list[int], token: int, *, at: float, parent: int | None = None) -> TraceTurn:
    seconds: dict[str, Any] = {"prepare_s": 0.0, "sample_s": 0.0, "compute_s": 0.0}
    texts: dict[str, Any] = {"response_id": "r", "route": "chat", "base_model": "b", "weights": "b", "match": "new"}
    sample = TurnSample(tokens=[token], logprobs=[-0.5], stop_reason="stop")
    facts = TurnFacts(**texts, **seconds, temperature=1.0, started_at=at)
    return TraceTurn(
        prompt=prompt, samples=[sample], facts=facts, parent=parent, parent_sample=None if parent is None else 0
    )


# Bodies

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from([*NewGroup.__struct_fields__, "x"])


@given(st.dictionaries(names, json_values) | json_values)
def test_any_body_becomes_a_record_or_a_clear_refusal(body: Any) -> None:
    try:
        response: NewGroup | Refusal = record_of(msgspec.json.encode(body), NewGroup)
    except Refusal as refusal:
        response = refusal
    assert isinstance(response, NewGroup) or (response.status, bool(response.detail)) == (400, True)


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500, b"NaN", b"1e999"])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        record_of(body, NewGroup)
