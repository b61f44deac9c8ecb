"""A collection through servers on a Ray cluster, one node of which is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from palestra.gym.collect.collection import CollectionStatus
from tests.gym.collect.conftest import write_rows
from tests.gym.collect.test_kills import check_delivered, collected, gym
from tests.gym.supervisor.test_ray import cluster

__all__ = ["cluster"]

COUNT = 600


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_row_comes_once_though_a_node_is_lost(
    cluster: Any, tmp_path: Path, start_upstream: Callable[[float], str]
) -> None:
    rows = write_rows(tmp_path / "in.jsonl", COUNT)
    (node,) = cluster.worker_nodes
    raylet = dict(node.live_processes())["raylet"].pid
    removals: list[asyncio.Task[None]] = []

    def response(standing: CollectionStatus) -> None:
        if standing.done >= COUNT // 4 and not removals:
            removing = asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            removals.append(asyncio.create_task(removing))

    async def run() -> tuple[CollectionStatus, list[dict[str, Any]]]:
        async with gym(start_upstream(0.05), "steady", f"ray_head_node_address={cluster.address}") as running:
            lost = [one["process_name"] for one in running.instances() if is_below(one["pid"], raylet)]
            assert lost, "Ray put nothing on the second node"
            standing = await collected(running, rows, response)
            await asyncio.gather(*removals)
            return standing, [one for one in running.instances() if one["process_name"] in lost]

    standing, lost = asyncio.run(asyncio.wait_for(run(), 240))
    assert (standing.done, standing.failed) == (COUNT, 0)
    assert all(one["restarts"] > 0 for one in lost)
    check_delivered(rows, COUNT)


def is_below(pid: int, ancestor: int) -> bool:
    return ancestor in {one.pid for one in psutil.Process(pid).parents()}
