"""Players, the server and the trainer are killed as they go, and what is trained on in the end is all there, once."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from palestra.episodes import EpisodeClient, NoEpisode, RunSettings
from palestra.types.episodes import PlayedGroup
from tests.server.episodes.bad_network import BadNetwork
from tests.server.episodes.conftest import Api
from tests.server.episodes.simulated_trainer import Books, new_group, read_books

KILLED = -9
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Plan:
    groups: int
    size: int
    machines: int
    players: int
    odds: float
    """That a claim is its machine's last; all players of it go with it. The first machine's first claim is."""
    lease_s: float
    every: int
    """Groups from one checkpoint of the trainer to the next."""
    kills: tuple[float, ...]
    """Of the server: after which part of the groups."""
    limit_s: float


SMALL = Plan(groups=4, size=3, machines=2, players=2, odds=0.0, lease_s=2.0, every=1, kills=(0.5,), limit_s=120)
BIG = Plan(
    groups=250, size=8, machines=8, players=8, odds=0.1 / 8, lease_s=8.0, every=4, kills=(0.25, 0.5, 0.75), limit_s=1000
)


SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "plan", [pytest.param(SMALL, id="small", marks=pytest.mark.slow), pytest.param(BIG, id="big", marks=SLOW)]
)
def test_every_episode_counts_once_whoever_is_killed(api: Api, tmp_path: Path, plan: Plan) -> None:
    file = tmp_path / "books.json"
    with Trainer(api, file, plan).running() as trainer, Machines(api, plan).running() as machines:
        deadline, kills = time.monotonic() + plan.limit_s, list(plan.kills)
        while not trainer.is_done():
            counted = len(read_books(file).counted)
            assert time.monotonic() < deadline, f"at {counted} groups: {api.info()}"
            machines.look_after()
            if kills and counted >= kills[0] * plan.groups:
                kills.pop(0)
                api.server.restart()
            time.sleep(0.05)
    books = read_books(file)
    assert books.problems == []
    assert_all_once(books, plan)
    assert (trainer.deaths, kills, machines.deaths > 0) == (2, [], True)
    assert books.attempts > plan.groups * plan.size
    info = api.info()
    assert (info["queued"], info["leased"], info["committed"]) == (0, 0, plan.groups)


def assert_all_once(books: Books, plan: Plan) -> None:
    assert sorted(name for name, _ in books.counted) == sorted(f"step/{number}" for number in range(plan.groups))
    episodes = [episode for _, members in books.counted for episode in members]
    assert len(episodes) == len(set(episodes)) == plan.groups * plan.size
    assert books.cursor == plan.groups


class Machines:
    """As many as the plan says, each started again when it dies."""

    def __init__(self, api: Api, plan: Plan):
        self._api, self._plan = api, plan
        self._seeds = itertools.count()
        self._running: list[subprocess.Popen[bytes]] = []
        self.deaths = 0

    @contextmanager
    def running(self) -> Iterator[Machines]:
        self._running = [self._start() for _ in range(self._plan.machines)]
        try:
            yield self
        finally:
            for process in self._running:
                process.terminate()
            for process in self._running:
                process.wait(60)

    def look_after(self) -> None:
        for place, process in enumerate(self._running):
            if (code := process.poll()) is not None:
                assert code == KILLED
                self.deaths += 1
                self._running[place] = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        plan = self._plan
        seed = next(self._seeds)
        odds = plan.odds if seed else 1.0
        options = ["--players", str(plan.players), "--odds", str(odds), "--seed", str(seed)]
        return start("simulated_player", self._api.server.url, self._api.run, *options)


class Trainer:
    """Dies twice: with a batch that is not in its checkpoint, and with a checkpoint that is not committed."""

    def __init__(self, api: Api, file: Path, plan: Plan):
        self._api, self._file, self._plan = api, file, plan
        self._ways = iter([f"checkpoint:{plan.groups // 4}", f"commit:{plan.groups // 2}", ""])
        self.deaths = 0
        self._process = self._start()

    @contextmanager
    def running(self) -> Iterator[Trainer]:
        try:
            yield self
        finally:
            self._process.kill()
            self._process.wait()

    def is_done(self) -> bool:
        """It is started again where it died."""
        code = self._process.poll()
        if code == KILLED:
            self.deaths += 1
            self._process = self._start()
        assert code in (None, 0, KILLED)
        return code == 0

    def _start(self) -> subprocess.Popen[bytes]:
        plan = self._plan
        sizes = [
            "--groups",
            str(plan.groups),
            "--size",
            str(plan.size),
            "--every",
            str(plan.every),
            "--lease",
            str(plan.lease_s),
        ]
        where = [self._api.server.url, self._api.run, str(self._file)]
        return start("simulated_trainer", *where, *sizes, "--dies", next(self._ways))


def start(module: str, *args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-X", "faulthandler", "-m", f"tests.server.episodes.{module}", *args]
    return subprocess.Popen(command, cwd=ROOT)


def test_a_network_that_repeats_delays_and_loses_changes_no_result(api: Api) -> None:
    groups, size = 12, 3
    with BadNetwork(api.server.url, seed=7) as network, EpisodeClient(network.url, "tml-test") as trainer:
        run = trainer.run(api.run, RunSettings(max_attempts=16, backoff_s=0.0, lease_s=1.0))
        run.register(new_group(number, size) for number in range(groups))
        with ThreadPoolExecutor(4) as threads:
            for _ in range(4):
                threads.submit(play_blindly, network.url, api.run)
            played: list[PlayedGroup] = []
            for group in run.groups(wait_s=60):
                played.append(group)
                run.commit(group.number)
                if len(played) == groups:
                    break
    assert [group.number for group in played] == list(range(1, groups + 1))
    assert sorted(group.group_id for group in played) == sorted(f"step/{number}" for number in range(groups))
    episodes = [episode.info for group in played for episode in group.episodes]
    assert len({info.episode_id for info in episodes}) == len(episodes) == groups * size
    assert all(info.result is not None and info.result.reward == info.seed % 97 for info in episodes)
    assert all(network.counts[fate] > 3 for fate in ("twice", "late", "lost")), network.counts
    assert (api.info()["committed"], api.info()["parked"]) == (groups, 0)


def play_blindly(url: str, run: str) -> None:
    with EpisodeClient(url, "tml-test") as client:
        while True:
            try:
                with client.episode(run, wait_s=1.5) as episode:
                    episode.end(episode.seed % 97)
            except NoEpisode:
                return


def test_a_poison_episode_is_parked_and_nobody_else_suffers(api: Api) -> None:
    """Whoever claims it is not heard of again."""
    api.put_run(max_attempts=2, backoff_s=0.0)
    poison, _ = api.register("g", size=2, on_loss="shrink", min_size=1)
    api.register("other")
    for number in (1, 2):
        assert api.claim_one(lease_s=0.2)["episode_id"] == poison
        api.server.until(lambda number=number: len(api.episode(poison)["losses"]) == number)
    info = api.episode(poison)
    assert (info["state"], [loss["reason"] for loss in info["losses"]]) == (
        "parked",
        ["expired: no heartbeat for 0.2 s"] * 2,
    )
    for lease in api.claim(max_n=8):
        assert api.end(lease)["status"] == "accepted"
    assert [(group["group_id"], len(group["episodes"])) for group in api.played()] == [("g", 1), ("other", 1)]
