"""The worker pool: many at a time, whatever single players do, and a stop that leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from palestra.episodes import (
    AsyncEpisodeClient,
    Episode,
    EpisodeApiError,
    EpisodeClient,
    NotPlayedHere,
    ServerSilent,
    play,
    play_async,
)
from palestra.episodes.client import pool
from palestra.episodes.client.http_exchange import CONNECT_S
from palestra.episodes.client.players import is_async
from palestra.episodes.client.retries import REACH_S, RETRIES
from palestra.types.episodes import EpisodeResult
from tests.episodes.client.conftest import group

SCRIPT = r"""
import logging, sys, time
from palestra.episodes import EpisodeClient, play

url, run = sys.argv[1:3]
seconds, drain_s, lease_s = map(float, sys.argv[3:])
logging.basicConfig(level=logging.INFO, stream=sys.stderr)

def player(episode):
    sys.stdout.write(f"playing {episode.id}\n")
    sys.stdout.flush()
    time.sleep(seconds)
    return 1.0

with EpisodeClient(url) as client:
    print("counts", play(client, player, run=run, concurrency=2, drain_s=drain_s, lease_s=lease_s), flush=True)
"""


@contextmanager
def running_pool(arena, run, *, seconds: float, drain_s: float = 600.0, lease_s: float = 60.0) -> Iterator[Any]:
    args = [sys.executable, "-c", SCRIPT, arena.url, run.name, *map(str, (seconds, drain_s, lease_s))]
    environment = os.environ | {"TINKER_API_KEY": arena.worker}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(args, **pipes, text=True, env=environment) as pool:
        try:
            yield pool
        finally:
            pool.kill()


def test_all_are_played_and_one_that_fails_ends_nothing(client, make_run):
    run = make_run(4, size=4)
    lock, together, most = threading.Lock(), 0, 0

    def player(episode):
        nonlocal together, most
        with lock:
            together, most = together + 1, max(most, together + 1)
        try:
            if episode.index == 1:
                raise ZeroDivisionError("in the player")
            if episode.index == 2:
                return EpisodeResult(reward=0.5, metrics={"turns": 2})
            if episode.index == 3:
                episode.end(0.25)
                return None
            return True
        finally:
            with lock:
                together -= 1

    response = []
    counts = play(client, player, run=run.name, concurrency=3, max_episodes=16, on_progress=response.append)
    assert (counts.claimed, counts.ended, counts.failed, counts.released, counts.lost) == (16, 12, 4, 0, 0)
    assert counts.reward_mean == pytest.approx((4 * 1 + 4 * 0.5 + 4 * 0.25) / 12)
    assert (counts.reason, most <= 3, response[-1] is counts) == ("max_episodes", True, True)
    rewards = [sorted(str(one.info.result.reward) for one in played.episodes) for played in run.groups(wait_s=0)]
    assert rewards == [["0.25", "0.5", "1.0", "None"]] * 4


def test_async_players_share_a_loop_and_a_bad_one_ends_nothing(client, make_run):
    run = make_run(1, size=6)
    loops = set()

    async def player(episode):
        loops.add(asyncio.get_running_loop())
        async with episode.openai() as model:
            await model.chat.completions.create(model=episode.model, messages=episode.task.prompt, max_tokens=2)
        if episode.index == 0:
            raise SystemExit("in the player")
        return 1.0

    # What stops a program is given back, and played again.
    counts = play(client, player, run=run.name, concurrency=6, max_episodes=8, on_error="release")
    assert (counts.ended, counts.released, len(loops)) == (5, 3, 1)


def test_a_pool_on_the_callers_loop(arena, make_run):
    run = make_run(1, size=4)
    seen = []

    async def scenario():
        async def player(episode):
            seen.append(asyncio.get_running_loop() is loop)
            return 0.5

        loop = asyncio.get_running_loop()
        async with AsyncEpisodeClient(arena.url, arena.trainer) as client:
            return await play_async(client, player, run=run.name, idle_s=0.1)

    counts = asyncio.run(scenario())
    assert (counts.ended, counts.reason, seen) == (4, "idle", [True] * 4)


def test_a_cancelled_pool_gives_its_episodes_back(arena, client, make_run):
    run = make_run(1, size=2)

    async def scenario():
        begun = asyncio.Semaphore(0)

        async def player(_episode):
            begun.release()
            await asyncio.Event().wait()

        async with AsyncEpisodeClient(arena.url, arena.trainer) as other:
            pool = asyncio.create_task(play_async(other, player, run=run.name, concurrency=2, drain_s=0))
            await begun.acquire()
            await begun.acquire()
            pool.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pool

    asyncio.run(scenario())
    assert run.refresh().queued == 2
    assert {one.attempt for one in client.claim(2, run=run.name)} == {2}


def test_a_player_that_says_nothing_gives_its_episode_back(client, make_run):
    run = make_run()
    answers = iter([None, 1.0])
    counts = play(client, lambda _: next(answers), run=run.name, concurrency=1, max_episodes=2)
    assert (counts.released, counts.ended) == (1, 1)


def test_a_player_without_what_a_task_needs_leaves_it_to_others(client, make_run):
    run = make_run(2, size=2)
    missing = iter([True])

    def player(_episode):
        if next(missing, False):
            raise NotPlayedHere("no such tool")
        return 1.0

    counts = play(client, player, run=run.name, concurrency=1, max_episodes=5)
    assert (counts.released, counts.ended) == (1, 4)


def test_a_pool_that_stops_at_what_it_cannot_play_holds_nothing(client, make_run):
    run = make_run(4, size=2)

    def player(_episode):
        raise NotPlayedHere("no such tool")

    with pytest.raises(NotPlayedHere, match="no such tool"):
        play(client, player, run=run.name, concurrency=4, stops_at_unplayed=True)
    now = run.refresh()
    assert (now.queued, now.leased) == (8, 0)


def test_a_pool_that_may_not_claim_says_why(client):
    with EpisodeClient(client.url, "tml-unknown") as stranger, pytest.raises(EpisodeApiError, match="401"):
        play(stranger, lambda _: 1.0)
    with pytest.raises(ValueError, match="concurrency=0"):
        play(client, lambda _: 1.0, concurrency=0)


def test_a_pool_may_be_there_before_its_run_and_says_so_once(client, make_run, caplog, monkeypatch):
    monkeypatch.setattr(pool, "LOOK_EVERY_S", 0.05)
    name = "test_a_pool_may_be_there_before_its_run_and_says_so_once"
    with ThreadPoolExecutor() as threads:
        playing = threads.submit(play, client, lambda _: 1.0, run=name, max_episodes=1, handle_signals=False)
        while not caplog.messages:
            assert not playing.done(), playing.exception()
            time.sleep(0.01)
        assert make_run().name == name
        assert playing.result(timeout=60).ended == 1
    said = f"{client.url}: run '{name}' does not exist yet; waiting up to 600 s for it"
    assert caplog.messages == [said]


def test_a_run_that_never_comes_is_waited_for_in_bounds(client, monkeypatch):
    monkeypatch.setattr(pool, "LOOK_EVERY_S", 0.05)
    with pytest.raises(EpisodeApiError, match="no run 'nowhere'"):
        play(client, lambda _: 1.0, run="nowhere", run_wait_s=0.2)


def test_a_pool_does_not_wait_for_a_server_that_was_never_there(caplog, monkeypatch):
    """Other calls of this client would be repeated for 5 minutes."""
    assert REACH_S + RETRIES.first_s < 5 >= CONNECT_S
    monkeypatch.setattr("palestra.episodes.client.retries.REACH_S", 0.3)
    with (
        EpisodeClient("http://127.0.0.1:1") as client,
        pytest.raises(ServerSilent, match="does not answer"),
    ):
        play(client, lambda _: 1.0, run="nowhere")
    assert len(caplog.messages) == 1
    assert "refused; trying again" in caplog.messages[0]


def test_a_signal_lets_episodes_finish(arena, make_run):
    run = make_run(1, size=4)
    with running_pool(arena, run, seconds=1.0, drain_s=60) as pool:
        assert "playing" in pool.stdout.readline()
        assert "playing" in pool.stdout.readline()
        pool.send_signal(signal.SIGTERM)
        said, logged = pool.communicate(timeout=30)
    assert pool.returncode == 0, logged
    assert "counts ended 2 (mean reward 1.000), failed 0, released 0, lost 0, playing 0" in said
    info = run.refresh()
    assert (info.ended, info.queued, info.leased) == (2, 2, 0)


@pytest.mark.parametrize("drain_s", [0.1, 600], ids=["limit", "second-signal"])
def test_a_stop_gives_back_what_does_not_finish(arena, make_run, drain_s):
    run = make_run(1, size=2)
    with running_pool(arena, run, seconds=600, drain_s=drain_s) as pool:
        assert "playing" in pool.stdout.readline()
        assert "playing" in pool.stdout.readline()
        pool.send_signal(signal.SIGINT)
        if drain_s == 600:
            while "stopping (SIGINT)" not in pool.stderr.readline():
                pass
            pool.send_signal(signal.SIGINT)
        said, logged = pool.communicate(timeout=30)
    assert pool.returncode == 0, logged
    assert "counts ended 0, failed 0, released 2, lost 0" in said
    info = run.refresh()
    assert (info.queued, info.leased) == (2, 0)


def test_async_callables_are_known():
    class Agent:
        async def __call__(self, episode):
            return 1.0

    assert is_async(Agent())
    assert not is_async(lambda _: 1.0)


def test_a_killed_players_episode_is_played_by_another(arena, client, make_run):
    run = make_run()
    with running_pool(arena, run, seconds=600, lease_s=1) as pool:
        first = pool.stdout.readline().split()[1]
        pool.kill()
    with client.episode(run.name, wait_s=30) as episode:
        assert (episode.id, episode.attempt) == (first, 2)
        with episode.openai() as model:
            model.chat.completions.create(model=episode.model, messages=episode.task.prompt, max_tokens=4)
        assert episode.end(1.0).is_kept
    (played,) = run.groups(wait_s=0)
    (one,) = played.episodes
    assert (one.info.attempt, one.info.losses[0].reason[:7], len(one.trajectories)) == (2, "expired", 1)


@pytest.mark.slow
def test_a_server_that_is_killed_and_restarted_costs_nothing(make_ephebe):
    """One player waits for an episode, one is in the middle, one about to end: all of them wait, and go on."""
    server = make_ephebe()
    with EpisodeClient(server.url) as client, ThreadPoolExecutor() as threads:
        run = client.run("r", model="ephebe")
        run.register([group("g0", 2)])
        first, second = client.claim(2)
        with first.openai() as model:
            begun = ask(model, first, first.task.prompt)
            claim = threads.submit(client.claim, run="r")
            server.kill()
            back = threads.submit(server.start)
            end = threads.submit(second.end, 0.0)
            more = [*begun, {"role": "user", "content": "Are you sure?"}]
            ask(model, first, more)
            back.result()
        assert end.result().is_kept
        assert first.check()
        assert first.end(1.0).is_kept
        run.register([group("g1")])
        (third,) = claim.result(60)
        third.release("enough")
        (played,) = run.groups(wait_s=0)
        info = {one.info.index: one.info for one in played.episodes}
        assert (info[0].result.reward, info[0].attempt, info[0].calls) == (1.0, 1, 2)
        assert (info[1].result.reward, info[1].attempt, info[1].calls) == (0.0, 1, 0)
        sampled = {one.info.index: sum(sum(path.loss_mask) for path in one.trajectories) for one in played.episodes}
        assert sampled[0] > 8  # what was said before the restart, and after
        assert sampled[1] == 0


def ask(model: openai.OpenAI, episode: Episode, messages: list[Any]) -> list[Any]:
    said = model.chat.completions.create(
        model=episode.model, messages=messages, max_tokens=8, extra_body={"min_tokens": 8}
    )
    return [*messages, {"role": "assistant", "content": said.choices[0].message.content}]
