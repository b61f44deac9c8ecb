"""How many rollouts are played at once: places that are never lost, and a limit that follows the engine's load."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from palestra.rollouts.local.following_limit import FIRST, LEAST, FollowingLimit, SamplingLoad
from palestra.rollouts.local.load_reader import open_load_reader
from palestra.rollouts.local.slots import RolloutSlots
from tests.properties import examples

IDLE = SamplingLoad(waiting=0, kv_used=0.1, cache_tokens=100_000)


@examples(100)
@example(["come", "come", "shrink", "cancel"], 1)  # one that waits is cancelled
@given(st.lists(st.sampled_from(["come", "leave", "cancel", "grow", "shrink"]), max_size=40), st.integers(1, 4))
def test_places_are_never_lost_nor_given_twice(events: list[str], limit: int) -> None:
    async def play() -> None:
        slots, tasks = RolloutSlots(limit), []
        playing: dict[int, asyncio.Event] = {}

        async def rollout(number: int) -> None:
            async with slots:
                playing[number] = asyncio.Event()
                try:
                    await playing[number].wait()
                finally:
                    del playing[number]

        for number, event in enumerate(events):
            before = len(playing)
            match event:
                case "come":
                    tasks.append(asyncio.create_task(rollout(number)))
                case "leave" if playing:
                    next(iter(playing.values())).set()
                case "cancel" if tasks:
                    tasks[number % len(tasks)].cancel()
                case "grow" | "shrink":
                    slots.resize(max(1, slots.limit + (1 if event == "grow" else -1)))
            for _ in range(4):
                await asyncio.sleep(0)
            assert slots.taken == len(playing)
            assert len(playing) <= max(slots.limit, before)
            assert slots.wanted == sum(not task.done() for task in tasks)
            assert len(playing) >= min(slots.limit, slots.wanted)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.wanted == 0

    asyncio.run(play())


def filled(wanted: int) -> FollowingLimit:
    """One whose rollouts are all there; nothing plays them."""
    following = FollowingLimit(lambda: pytest.fail("not asked"))
    following.slots.taken = wanted
    return following


def test_the_limit_grows_while_the_engine_has_room_and_somebody_waits():
    following = filled(FIRST)
    assert following.next_limit(IDLE) == FIRST  # nobody waits for a place
    following.slots.taken += 1
    roomy, tight, full = (SamplingLoad(0, used, 100_000) for used in (0.1, 0.7, 0.99))
    found = [following.next_limit(load) for load in (roomy, tight, full)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[1] > found[2] == FIRST


def test_it_falls_when_samples_wait_for_longer_than_a_moment():
    following, crowded = filled(FIRST), SamplingLoad(waiting=20, kv_used=0.9, cache_tokens=100_000)
    assert following.next_limit(crowded) == FIRST
    assert following.next_limit(IDLE) == FIRST
    assert following.next_limit(crowded) == FIRST
    assert following.next_limit(crowded) == FIRST - 20
    following.slots.limit = FIRST - 20  # those that wait are not gone yet
    assert following.next_limit(crowded) == FIRST - 20
    assert following.next_limit(SamplingLoad(waiting=10_000, kv_used=1.0, cache_tokens=1)) == LEAST


def test_rollouts_between_two_turns_find_their_prefixes_in_the_cache():
    following = filled(FIRST + 1)
    for _ in range(50):
        following.note_length(20_000)
    assert following.next_limit(IDLE) == 10
    for _ in range(20):
        following.note_length(0)
    assert following.next_limit(IDLE) > 10


def test_a_server_says_how_full_its_engine_is(shared_ephebe):
    async def read(url: str | None, name: str) -> SamplingLoad | None:
        async with open_load_reader(url, name) as load:
            return await load()

    found = asyncio.run(read(shared_ephebe().url, "ephebe"))
    assert found is not None
    assert found.waiting >= 0
    assert asyncio.run(read(shared_ephebe().url, "another")) is None
    assert asyncio.run(read("http://127.0.0.1:9", "ephebe")) is None
    assert asyncio.run(read(None, "ephebe")) is None
