"""Claims and readings that wait: woken at once, in turn, and without a trace of those who left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.episodes.conftest import Api, group

Soon = Callable[..., Future[Any]]


@pytest.fixture
def soon() -> Iterator[Soon]:
    """Calls something beside the test."""
    with ThreadPoolExecutor(16) as threads:
        yield threads.submit


def waiting(api: Api) -> float:
    """Claims, over all runs."""
    return api.metric("palestra_episode_claims_waiting")


def test_a_claim_waits_for_its_episode(alice: Api, soon: Soon) -> None:
    claim = soon(alice.claim, wait_s=30)
    alice.server.until(lambda: waiting(alice) == 1)
    alice.register()
    (lease,) = claim.result(20)
    assert lease["attempt"] == 1
    assert alice.claim(wait_s=0.01) == []


def test_who_waited_longest_is_served_first(alice: Api, soon: Soon) -> None:
    claims: list[Future[Any]] = []
    for number in range(8):
        claims.append(soon(alice.claim, client_id=f"p{number}", wait_s=30, kind="train" if number % 2 else None))
        alice.server.until(lambda number=number: waiting(alice) == number + 1)
    for number, claim in enumerate(claims):
        alice.register(f"g{number}")
        assert len(claim.result(20)) == 1
        assert not any(later.done() for later in claims[number + 1 :])
    assert waiting(alice) == 0


def test_many_waiters_get_one_each_and_nothing_twice(alice: Api, soon: Soon) -> None:
    claims = [soon(alice.claim, client_id=f"p{number}", wait_s=30) for number in range(12)]
    alice.server.until(lambda: waiting(alice) == 12)
    ids = alice.register(size=12)
    got = [lease["episode_id"] for claim in claims for lease in claim.result(20)]
    assert sorted(got) == sorted(ids)


def test_who_leaves_while_waiting_has_claimed_nothing(alice: Api) -> None:
    body = {"client_id": "x", "claim_id": "left", "run": alice.run, "wait_s": 30}
    with pytest.raises(httpx.ReadTimeout):
        alice.send("POST", "claim", body, timeout=httpx.Timeout(30, read=0.3))
    alice.server.until(lambda: waiting(alice) == 0)
    alice.register()
    assert alice.info()["queued"] == 1
    assert alice.claim_one()["attempt"] == 1


def test_the_same_claim_twice_at_once_is_one_claim(alice: Api, soon: Soon) -> None:
    """A client that lost its connection asks again while the server still holds the first."""
    claims = [soon(alice.claim, "same", wait_s=30) for _ in range(2)]
    alice.server.until(lambda: waiting(alice) == 1)
    alice.register(size=2)
    first, second = (claim.result(20) for claim in claims)
    for lease in first + second:
        del lease["expires_at"]  # asked twice, it is renewed
    assert first == second
    assert len(first) == 1
    assert alice.info()["leased"] == 1


def test_a_claim_for_another_run_goes_on_waiting(alice: Api, soon: Soon) -> None:
    other = Api(alice.server, alice.key)
    other.put_run()
    here, there = soon(alice.claim, wait_s=30), soon(other.claim, wait_s=30)
    alice.server.until(lambda: waiting(alice) == 2)
    alice.register()
    assert len(here.result(20)) == 1
    assert not there.done()
    other.of_run("groups", groups=[group()])
    assert len(there.result(20)) == 1


def test_back_off_and_resume_wake_those_who_wait(alice: Api, soon: Soon) -> None:
    alice.put_run(backoff_s=0.2)
    alice.register()
    lease = alice.claim_one()
    alice.post("release", client_id="player", leases=[{"episode_id": lease["episode_id"], "attempt": 1}])
    assert alice.claim_one(wait_s=20)["attempt"] == 2
    alice.of_run("pause")
    alice.register("more")
    claim = soon(alice.claim, wait_s=30)
    alice.server.until(lambda: waiting(alice) == 1)
    alice.of_run("resume")
    assert len(claim.result(20)) == 1


def test_a_trainer_waits_for_its_group(alice: Api, soon: Soon) -> None:
    alice.register(size=2)
    leases = alice.claim(max_n=2)
    reading = soon(alice.played, wait_s=30)
    alice.end(leases[0])
    assert not reading.done()
    alice.end(leases[1])
    assert [one["group_id"] for one in reading.result(20)] == ["g"]
    assert alice.played(after=1, wait_s=0.01) == []
