"""Episodes from registration to commit, by the client library, with a real server and model."""

from __future__ import annotations

import asyncio
import time

import pytest

from palestra.episodes import AsyncEpisodeClient, EpisodeApiError, EpisodeClient, InvalidResult, NoEpisode
from palestra.types.episodes import EndStatus, GroupState
from tests.episodes.client.conftest import QUICK, group


def talk(episode) -> str:
    with episode.openai() as model:
        answer = model.chat.completions.create(model=episode.model, messages=episode.task.prompt, max_tokens=8)
    return answer.choices[0].message.content


def states(run) -> list[str]:
    return [str(one.state) for one in run.episodes().episodes]


def test_an_episode_is_played_delivered_and_committed(client, make_run):
    run = make_run(tags={"level": "easy"}, seeds=(5,))
    with client.episode(run.name) as episode:
        assert (episode.seed, episode.attempt, episode.group_id, episode.index) == (5, 1, "g0", 0)
        assert (episode.task.id, episode.tags, episode.run) == ("t1", {"level": "easy"}, run.name)
        assert episode.can_continue
        talk(episode)
        assert episode.end(0.75, is_success=True, metrics={"turns": 1}, metadata={"note": "ü"}).is_kept
    (played,) = run.groups(wait_s=0)
    assert (played.number, played.state, played.task) == (1, GroupState.READY, episode.task)
    (one,) = played.episodes
    assert (one.info.result.reward, one.info.result.metrics, one.info.calls) == (0.75, {"turns": 1.0}, 1)
    (path,) = one.trajectories
    assert sum(path.loss_mask) > 0
    assert run.commit(played.number).committed == 1
    assert list(run.groups(wait_s=0)) == []
    assert episode.end(0.75, is_success=True, metrics={"turns": 1}, metadata={"note": "ü"}).status == EndStatus.REPEATED


def test_a_player_that_raises_ends_its_episode_as_failed(client, make_run):
    run = make_run()
    with pytest.raises(KeyError), client.episode(run.name):
        raise KeyError("no such tool")
    (played,) = run.groups(wait_s=0)
    result = played.episodes[0].info.result
    assert (result.reward, result.error.type, result.error.message) == (None, "KeyError", "'no such tool'")


def test_a_reward_that_is_no_number_ends_it_as_failed(client, make_run):
    run = make_run()
    with pytest.raises(InvalidResult, match="reward is nan"), client.episode(run.name) as episode:
        episode.end(float("nan"))
    (played,) = run.groups(wait_s=0)
    assert played.episodes[0].info.result.error.type == "InvalidResult"


@pytest.mark.parametrize("how", ["interrupt", "exit", "forgotten", "option"])
def test_what_is_left_in_other_ways_is_played_by_another(client, make_run, how):
    run = make_run()
    try:
        with client.episode(run.name, on_error="release" if how == "option" else "end") as first:
            if how != "forgotten":
                raise {"interrupt": KeyboardInterrupt, "exit": SystemExit, "option": RuntimeError}[how]("away")
    except (KeyboardInterrupt, SystemExit, RuntimeError):
        pass
    with client.episode(run.name, wait_s=20) as second:
        assert (second.id, second.attempt) == (first.id, 2)
        second.end(1)
    (loss,) = client.episode_info(first.id).losses
    assert ("left without end()" if how == "forgotten" else "away") in loss.reason
    with pytest.raises(InvalidResult, match="was given back"):
        first.end(0)


def test_waiting_for_an_episode_has_a_bound_where_one_is_given(client, make_run):
    run = make_run(0)
    with pytest.raises(NoEpisode, match="no episode within 0 s"), client.episode(run.name, wait_s=0):
        pass
    assert client.claim(5, run=run.name, wait_s=0) == []
    with pytest.raises(EpisodeApiError, match="no run 'nowhere'"):
        client.claim(run="nowhere")
    with pytest.raises(ValueError, match="'exam' is not a valid EpisodeKind"):
        client.claim(kind="exam")


def test_many_are_claimed_and_ended_at_once(client, make_run):
    run = make_run(3, size=2)
    episodes = client.claim(6, run=run.name)
    assert len({episode.id for episode in episodes}) == 6
    response = client.end_many((episode, episode.index) for episode in episodes)
    assert {one.status for one in response} == {EndStatus.ACCEPTED}
    rewards = [[one.info.result.reward for one in played.episodes] for played in run.groups(wait_s=0)]
    assert [sorted(one) for one in rewards] == [[0.0, 1.0]] * 3


def test_a_group_is_registered_once_and_not_differently(client, make_run):
    run = make_run()
    again, new = run.register([group("g0"), group("g1")])
    assert (again.is_new, new.is_new) == (False, True)
    with pytest.raises(EpisodeApiError, match="was registered differently before"):
        run.register([group("g0", size=3)])
    assert states(run) == ["queued", "queued"]


def test_a_cancelled_episode_tells_its_player(client, make_run):
    run = make_run()
    with client.episode(run.name) as episode:
        assert run.cancel(group_ids=["g0"], reason="enough") == 1
        assert not episode.check()
        assert episode.reason.startswith("cancelled")
        assert episode.end(1.0).status == EndStatus.CANCELLED
    (played,) = run.groups(wait_s=0)
    assert (played.state, played.reason) == (GroupState.DROPPED, "cancelled: enough")


def test_weights_are_published_and_a_paused_run_gives_nothing(client, make_run):
    run = make_run(2)
    assert run.publish(3, "ephebe").version == 3
    assert run.pause().is_paused
    assert client.claim(run=run.name, wait_s=0) == []
    run.resume()
    (episode,) = client.claim(run=run.name)
    assert (episode.version, episode.model) == (3, "ephebe")
    episode.release("enough for now")
    assert run.refresh().queued == 2


def test_parked_ones_are_queued_again(client, make_run):
    run = make_run(on_loss="shrink", size=3)
    for _ in range(16):
        (episode,) = client.claim(run=run.name)
        episode.release("cannot do it")
    assert states(run).count("parked") == 1
    assert run.requeue([episode.id]) == 1
    assert "parked" not in states(run)


def test_a_deleted_run_is_gone_and_its_players_hear_of_it(arena, client, make_run):
    run = make_run(2)
    with client.episode(run.name) as episode:
        assert run.delete() == 2
        assert not episode.check()
        assert (episode.reason, episode.end(1.0).status) == ("cancelled: its run was deleted", EndStatus.CANCELLED)

    async def again() -> list[int]:
        async with AsyncEpisodeClient(arena.url, arena.trainer) as other:
            mine = await other.run(run.name, model="ephebe")
            return [await mine.delete(), await other.delete_run(run.name)]

    assert asyncio.run(again()) == [0, 0]
    with pytest.raises(EpisodeApiError, match="no run"):
        run.refresh()


def test_a_heartbeat_keeps_a_lease_through_a_long_tool_call(client, make_run):
    run = make_run()
    with client.episode(run.name, lease_s=1) as episode:
        begin = client.episode_info(episode.id)
        while time.time() < begin.claimed_at + 2.5:  # the tool
            time.sleep(0.05)
        now = client.episode_info(episode.id)
        assert (now.state, now.attempt) == ("leased", 1)
        assert now.expires_at > begin.expires_at + 1
        assert episode.can_continue
        assert episode.end(1.0).is_kept


def test_coroutines_play_and_train(arena, make_run):
    run = make_run(2)

    async def scenario() -> None:
        async with AsyncEpisodeClient(arena.url, arena.trainer) as client:
            with pytest.raises(KeyError):
                async with client.episode(run.name):
                    raise KeyError("no such tool")
            async with client.episode(run.name) as episode, episode.openai() as model:
                await model.chat.completions.create(model=episode.model, messages=episode.task.prompt, max_tokens=4)
                assert await episode.check()
                assert (await episode.end(0.5)).is_kept
            mine = await client.run(run.name, QUICK)
            played = [one async for one in mine.groups(wait_s=0)]
            assert [one.episodes[0].info.result.reward for one in played] == [None, 0.5]
            assert (await mine.commit(played[-1].number)).committed == 2
            with pytest.raises(NoEpisode):
                async with client.episode(run.name, wait_s=0):
                    pass
            await mine.register([group("more", 2)])
            two = await client.claim(2, run=run.name)
            assert [one.is_kept for one in await client.end_many([(two[0], 1), (two[1], 0)])] == [True, True]
            assert [one.run for one in await client.runs() if one.run == run.name] == [run.name]

    asyncio.run(scenario())


def test_a_task_that_is_cancelled_gives_its_episode_back(arena, client, make_run):
    run = make_run()

    async def scenario() -> None:
        async with AsyncEpisodeClient(arena.url, arena.trainer) as other:
            playing = asyncio.Event()

            async def play() -> None:
                async with other.episode(run.name):
                    playing.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(play())
            await playing.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    with client.episode(run.name, wait_s=20) as episode:
        assert episode.attempt == 2
        episode.end(1)


def test_a_release_that_is_cancelled_still_arrives(arena, make_run):
    run = make_run()

    async def scenario() -> None:
        async with AsyncEpisodeClient(arena.url, arena.trainer) as other:
            (episode,) = await other.claim(run=run.name, wait_s=20)
            releasing = asyncio.create_task(episode.release())
            await asyncio.sleep(0)
            releasing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await releasing

    asyncio.run(scenario())
    assert run.refresh().queued == 1


def test_a_claim_that_waits_is_served_when_something_comes(arena, client, make_run):
    run = make_run(0)

    async def scenario() -> None:
        async with AsyncEpisodeClient(arena.url, arena.trainer) as other:
            waiting = asyncio.create_task(other.claim(run=run.name))
            _, still = await asyncio.wait({waiting}, timeout=0.3)
            assert still  # the request is at the server
            await asyncio.to_thread(run.register, [group("late")])
            (episode,) = await waiting
            await episode.end(1.0)

    asyncio.run(scenario())
    assert [one.group_id for one in run.groups(wait_s=0)] == ["late"]


def test_a_worker_plays_and_does_nothing_else(arena, make_run):
    run = make_run()
    with EpisodeClient(arena.url, "tml-wrong") as client, pytest.raises(EpisodeApiError, match="not valid"):
        client.claim(wait_s=0)
    with EpisodeClient(arena.url, arena.worker) as worker:
        with pytest.raises(EpisodeApiError, match="needs admin or trainer"):
            worker.runs()
        with worker.episode(run.name) as episode:
            talk(episode)
            assert episode.end(1.0).is_kept
