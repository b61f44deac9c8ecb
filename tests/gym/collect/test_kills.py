"""A collection through servers that die: every row is delivered, none twice."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from palestra.environments.gym.directory import ServerDirectory
from palestra.gym.collect.collection import CollectionRequest, CollectionStatus, collect
from palestra.gym.collect.files import read_lines
from palestra.gym.collect.playing import RowPlayer
from palestra.gym.collect.rows import Expansion, key_of
from palestra.gym.config import GymSources, ReservedPorts, load_gym
from palestra.gym.supervisor import Supervisor
from palestra.net.http_client import HttpClient
from palestra.rollouts.gym.row_calls import RetryPolicy
from tests.gym.collect.conftest import MCQA, write_rows


@asynccontextmanager
async def gym(url: str, model: str, *overrides: str) -> AsyncIterator[Supervisor]:
    """Every server a process of its own."""
    policy = {"policy_base_url": url, "policy_api_key": "x", "policy_model_name": model}
    with ReservedPorts() as ports:
        expected = ("++gym.isolation=process", *overrides)
        sources = GymSources(files=MCQA[1::2], overrides=expected, initial={**policy, "head_server": free_head()})
        async with Supervisor(load_gym(sources, ports=ports), ports, lambda line: None) as running:
            await running.ready()
            yield running


def free_head() -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"host": "127.0.0.1", "port": probe.getsockname()[1]}


async def collected(
    running: Supervisor, rows: Path, told: Callable[[CollectionStatus], None], patience: RetryPolicy | None = None
) -> CollectionStatus:
    expected = CollectionRequest(
        input=rows,
        output=rows.with_name("out.jsonl"),
        expansion=Expansion(agent="mcqa_simple_agent"),
        concurrency=32,
        patience=patience or RetryPolicy(),
    )
    async with HttpClient() as client:
        directory = await ServerDirectory.of_head(client, running.head_url)
        return await collect(
            expected, RowPlayer(client, directory, expected.patience), await directory.settings(), told
        )


def check_delivered(rows: Path, count: int) -> None:
    results = list(read_lines(rows.with_name("out.jsonl")))
    assert sorted(key_of(one)[0] for one in results) == list(range(count))
    assert all(one["reward"] == one["_ng_task_index"] % 2 for one in results)


def kill_along_the_way(running: Supervisor, total: int, number: signal.Signals) -> Callable[[CollectionStatus], None]:
    """Each server once, spread over the collection."""
    names = list(running.config.servers)
    due = {total * (at + 1) // (len(names) + 1): name for at, name in enumerate(names)}

    def response(standing: CollectionStatus) -> None:
        for done in [at for at in due if standing.done >= at]:
            name = due.pop(done)
            (pid,) = [one["pid"] for one in running.instances() if one["process_name"] == name]
            os.kill(pid, number)

    return response


@pytest.mark.parametrize(
    ("count", "delay_s"),
    [pytest.param(120, 0.01, id="small"), pytest.param(2000, 0.05, id="large", marks=pytest.mark.slow)],
)
def test_every_row_comes_once_though_each_kind_of_server_is_killed(
    tmp_path: Path, start_upstream: Callable[[float], str], count: int, delay_s: float
) -> None:
    rows = write_rows(tmp_path / "in.jsonl", count)

    async def run() -> CollectionStatus:
        async with gym(start_upstream(delay_s), "steady") as running:
            return await collected(running, rows, kill_along_the_way(running, count, signal.SIGKILL))

    standing = asyncio.run(asyncio.wait_for(run(), 110))
    assert (standing.done, standing.failed) == (count, 0)
    check_delivered(rows, count)


@pytest.mark.slow
def test_a_server_that_hangs_is_started_anew_and_its_rows_are_played(
    tmp_path: Path, start_upstream: Callable[[float], str]
) -> None:
    rows = write_rows(tmp_path / "in.jsonl", 200)

    async def run() -> CollectionStatus:
        quick = ("++gym.probe_interval_s=0.2", "++gym.probe_timeout_s=0.5", "++gym.probe_failures=3")
        async with gym(start_upstream(0.02), "steady", *quick) as running:
            return await collected(running, rows, kill_along_the_way(running, 200, signal.SIGSTOP))

    standing = asyncio.run(asyncio.wait_for(run(), 110))
    assert (standing.done, standing.failed) == (200, 0)
    check_delivered(rows, 200)


@pytest.mark.slow
def test_a_model_that_answers_429_500_and_garbage_costs_no_row(
    tmp_path: Path, start_upstream: Callable[[float], str]
) -> None:
    rows = write_rows(tmp_path / "in.jsonl", 200)

    async def run() -> CollectionStatus:
        async with gym(start_upstream(0.0), "shaky") as running:
            return await collected(running, rows, lambda standing: None, RetryPolicy(attempts=6))

    assert asyncio.run(asyncio.wait_for(run(), 110)).done == 200
    check_delivered(rows, 200)


@pytest.mark.slow
def test_two_gyms_on_one_machine(tmp_path: Path, upstream: str) -> None:
    async def run() -> None:
        async with gym(upstream, "steady") as one, gym(upstream, "steady") as other:
            folders = [tmp_path / "one", tmp_path / "other"]
            for folder in folders:
                folder.mkdir()
            rows = [write_rows(folder / "in.jsonl", 40) for folder in folders]
            await asyncio.gather(
                *(collected(running, own, lambda _: None) for running, own in zip((one, other), rows, strict=True))
            )
            for own in rows:
                check_delivered(own, 40)

    asyncio.run(asyncio.wait_for(run(), 100))
