"""Which replica gets which sample, and who waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from palestra.server.core.checkpoints.adapter_transfers import TransferredAdapter
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.replicas.errors import ReplicaLost
from palestra.server.replicas.replica import Replica, Tell
from palestra.server.replicas.replica_set import ReplicaSet
from palestra.types import LoraConfig, SampleRequest
from palestra.types.engine import BaseModel, Sample, Sampled

ADAPTERS = [TransferredAdapter(str(n) * 64, 1, LoraConfig(rank=1)) for n in range(2)]


class Place(Replica):
    """It is only chosen here, and samples nothing."""

    @property
    def where(self) -> str:
        return f"place {self.number}"

    async def sample(self, sample: Sample, adapter: str | None, tell: Tell) -> Sampled:
        raise NotImplementedError

    async def stop(self) -> None:
        return


def replicas(count: int, *, slots: int = 2, wait_s: float = 60.0) -> ReplicaSet:
    found = ReplicaSet("m", Metrics(), wait_s=wait_s)
    for number in range(count):
        found.add(place := Place(number, max_in_flight=slots))
        place.is_up = True
    return found


def a_sample(*prompt: int, count: int = 1, owner: str = "") -> Sample:
    request = SampleRequest(prompt=prompt, num_samples=count, cache_salt=owner)
    return Sample(request_id=str(prompt), weights=BaseModel(), request=request)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_a_group_stays_together_until_its_replica_is_full():
    async def work() -> None:
        found = replicas(2, slots=3)
        async with AsyncExitStack() as stack:

            async def place(*prompt: int, adapter: TransferredAdapter | None = None) -> int:
                return (await stack.enter_async_context(found.place(a_sample(*prompt), adapter))).number

            assert [await place(1, 2) for _ in range(2)] == [0, 0]
            assert await place(1, 2, adapter=ADAPTERS[0]) == 1  # other weights are another group
            assert await place(1, 2) == 0
            assert await place(1, 2) == 1  # the first is full
        assert (found.placed, [r.sequences for r in found.replicas]) == (0, [0, 0])

    run(work())


def test_the_least_busy_one_is_chosen_by_the_sequences_it_has():
    async def work() -> None:
        found = replicas(2)
        async with found.place(a_sample(1, count=8), None) as first, found.place(a_sample(2), None) as second:
            assert (first.number, second.number) == (0, 1)
            async with found.place(a_sample(3), None) as third:
                assert third.number == 1

    run(work())


def test_a_conversation_goes_on_where_it_is():
    async def work() -> None:
        found = replicas(2)
        found.note((1, 2, 3, 4), found.replicas[1])
        async with found.place(a_sample(1, 2, 3, 4, 5), None) as replica:
            assert replica.number == 1
        async with found.place(a_sample(1, 2, 3, 4, 5), None, avoid=found.replicas[1]) as replica:
            assert replica.number == 0

    run(work())


def test_who_waits_gets_the_next_free_place_in_order_also_at_one_that_joins():
    async def work() -> None:
        found, order = replicas(1, slots=1), []

        async def use(number: int, ended: asyncio.Event) -> None:
            async with found.place(a_sample(number), None) as replica:
                order.append((number, replica.number))
                await ended.wait()

        ends = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(use(n, end)) for n, end in enumerate(ends)]
        await asyncio.sleep(0)
        assert order == [(0, 0)]
        tasks[1].cancel()
        ends[0].set()
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        await asyncio.sleep(0)
        assert order == [(0, 0), (2, 0)]
        found.add(late := Place(1, max_in_flight=1))
        late.is_up = True
        found.on_change(late)
        for end in ends:
            end.set()
        await asyncio.gather(*tasks[2:])
        assert order == [(0, 0), (2, 0), (3, 1)]

    run(work())


def test_owners_take_turns_and_the_adapters_of_each_among_themselves():
    async def work() -> None:
        found, order = replicas(1, slots=1), []

        async def use(name: str, adapter: TransferredAdapter | None) -> None:
            async with found.place(a_sample(1, owner=name[0]), adapter):
                order.append(name)
                await asyncio.sleep(0)

        async with found.place(a_sample(0), None):
            calls = [("a0", ADAPTERS[0]), ("a1", ADAPTERS[0]), ("a2", ADAPTERS[0]), ("a3", ADAPTERS[1])]
            tasks = [asyncio.create_task(use(*call)) for call in (*calls, ("b0", None), ("b1", None))]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert order == ["a0", "a1", "b0", "a3", "b1", "a2"]  # the very first one came before there was a line

    run(work())


def test_without_any_replica_a_sample_fails_after_a_while():
    async def work() -> None:
        with pytest.raises(ReplicaLost, match=r"no sampler was available for 0.01 s: no replica has joined"):
            async with replicas(0, wait_s=0.01).place(a_sample(1), None):
                pass

    run(work())
