"""Leases on bad days: beats that get lost, servers that change their mind, claims that nobody waits for any more."""

from __future__ import annotations

import asyncio

import pytest

from palestra.episodes import AsyncEpisodeClient, EpisodeClient, InvalidResult, ServerSilent
from palestra.episodes.client.results import result_of
from tests.episodes.client.faults import (
    Answer,
    Drop,
    FaultServer,
    Seen,
    Wait,
    beaten,
    claimed,
    ended,
    lease,
    polite,
)
from tests.waiting import until


def test_beats_go_on_after_some_were_lost_and_tell_all_leases_at_once():
    acts = (claimed(lease(1, 0.15), lease(2, 0.15)), Drop(), Answer(503, b""), polite)
    with FaultServer(*acts) as server, EpisodeClient(server.url) as client:
        episodes = client.claim(2)
        beats = server.wait_for("/heartbeat", 5)
        assert {ref["episode_id"] for ref in beats[0].body["leases"]} == {"e1", "e2"}
        assert all(seen.body["client_id"] == client.client_id for seen in beats)
        assert all(episode.can_continue for episode in episodes)
        client.end_many([(episode, 1.0) for episode in episodes])
        until(lambda: client.inner.leases.heartbeat._thread is None)  # nothing to keep, nothing runs


def test_a_claim_whose_leases_ran_out_before_it_was_answered_is_made_anew():
    acts = (Drop(), Answer(409, {"detail": "all its leases have ended"}), claimed(lease(1)), polite)
    with FaultServer(*acts) as server, EpisodeClient(server.url) as client:
        assert [episode.id for episode in client.claim()] == ["e1"]
        ids = [seen.body["claim_id"] for seen in server.requests]
        assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda seen: beaten(seen, can_continue=False, reason="cancelled: enough"), "cancelled: enough"),
        (lambda _: Answer(401, {"detail": "this key is not valid"}), "refused: this key is not valid"),
    ],
)
def test_a_player_learns_that_it_cannot_go_on(answer, reason):
    with FaultServer(claimed(lease(1, 0.15)), answer) as server, EpisodeClient(server.url) as client:
        (episode,) = client.claim()
        until(lambda: not episode.can_continue)
        assert episode.reason == reason
        episode.leave(ValueError("what the player made of it"))  # no request: there is nothing to give back
        assert server.requests[-1].path.endswith("/heartbeat")


def test_what_is_open_is_given_back_at_the_end():
    with FaultServer(claimed(lease(1), lease(2)), polite) as server:
        with EpisodeClient(server.url) as client:
            first, _second = client.claim(2)
            assert first.end(0.5, metrics={"turns": 3}).is_kept
        assert [seen.path.rpartition("/")[2] for seen in server.requests] == ["claim", "end", "release"]
        assert server.requests[1].body["ends"][0]["result"]["reward"] == 0.5
        assert server.requests[2].body["leases"] == [{"episode_id": "e2", "attempt": 1}]


def test_a_result_the_server_is_never_told_leaves_no_lease_behind():
    def away(seen: Seen) -> Answer:
        return Answer(503, b"") if seen.path.endswith(("/end", "/release")) else polite(seen)

    with FaultServer(claimed(lease(1)), away) as server, EpisodeClient(server.url, retry_s=0.2) as client:
        with pytest.raises(ServerSilent), client.episode() as episode:
            episode.end(1.0)
        assert episode.is_over
        assert client.inner.leases.heartbeat.clear() == []


def test_an_end_that_gets_lost_is_sent_again_as_it_was():
    with FaultServer(claimed(lease(1)), Drop(), Drop(), polite) as server, EpisodeClient(server.url) as client:
        with client.episode() as episode:
            episode.end(1.0)
        ends = [seen.body for seen in server.requests if seen.path.endswith("/end")]
        assert len(ends) == 3
        assert ends[0] == ends[1] == ends[2]


def test_a_result_that_is_too_late_is_told_and_one_that_is_wrong_raises():
    late, wrong = (lambda seen: ended(seen, "lease_lost")), (lambda seen: ended(seen, "invalid"))
    acts = (claimed(lease(1), lease(2)), late, wrong, polite)
    with FaultServer(*acts) as server, EpisodeClient(server.url) as client:
        first, second = client.claim(2)
        assert not first.end(1.0).is_kept
        assert (first.can_continue, first.reason) == (False, "lease_lost")
        with pytest.raises(InvalidResult, match="invalid"):
            second.end(1.0)
        assert second.end(0.0).is_kept  # it could still be mended


@pytest.mark.parametrize(
    "given",
    [
        {"reward": float("nan")},
        {"reward": float("inf")},
        {"reward": "much"},
        {"reward": 1, "metrics": {"x": float("nan")}},
        {"step_rewards": [0.0, float("-inf")]},
        {"agent_rewards": {"a": None}},
        {},
        {"is_success": True},
    ],
)
def test_a_result_that_no_server_would_take_is_not_sent(given):
    with pytest.raises(InvalidResult):
        result_of(**given)


def test_a_claim_that_is_cancelled_gives_back_what_still_comes():
    answer = Wait(claimed(lease(1)))

    async def scenario(server: FaultServer) -> None:
        async with AsyncEpisodeClient(server.url) as client:
            waiting = asyncio.create_task(client.claim())
            await asyncio.to_thread(server.wait_for, "/claim")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting  # at once, though the request goes on
            answer.now.set()
            await asyncio.to_thread(server.wait_for, "/release")

    with FaultServer(answer, polite) as server:
        asyncio.run(scenario(server))
        assert server.requests[1].body["leases"] == [{"episode_id": "e1", "attempt": 1}]
        assert server.requests[1].body["reason"] == "the claim was cancelled"


def test_a_coroutine_waits_for_a_server_that_is_away_without_a_thread():
    async def scenario(server: FaultServer) -> None:
        async with AsyncEpisodeClient(server.url) as client:
            waiting = asyncio.create_task(client.runs())
            await asyncio.to_thread(server.wait_for, "/runs")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    with FaultServer(Answer(503, b"", retry_after="30")) as server:
        asyncio.run(scenario(server))
        assert len(server.requests) == 1
