"""Servers on a Ray cluster of two nodes on this machine; one of them is lost."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from palestra.gym.config import GymSources, ReservedPorts, load_gym
from palestra.gym.supervisor import Supervisor
from tests.gym.supervisor.conftest import PATIENCE_S, still_alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        # Before there is a second node: both have the same address, and this process must be with the one that stays.
        ray.init(address=made.address, log_to_driver=False)
        made.add_node(num_cpus=1)
        made.wait_for_nodes()
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def posted(url: str) -> Any:
    request = urllib.request.Request(f"{url}/anything", b"{}", {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


async def all_back(gym: Supervisor, lost: set[str]) -> None:
    """Ends where the gym does, too."""
    running = asyncio.create_task(gym.run())
    while any(one["restarts"] == 0 for one in gym.instances() if one["process_name"] in lost) or not gym.is_healthy:
        await asyncio.wait({running}, timeout=0.05)
        if running.done():
            running.result()
    running.cancel()


def test_servers_move_when_their_node_is_lost(cluster: Any, gym_root: Path) -> None:
    overrides = ["head_server.port=0", f"ray_head_node_address={cluster.address}", "gym.probe_timeout_s=5"]
    response: list[str] = []

    async def run(gym: Supervisor) -> list[psutil.Process]:
        before = {one["process_name"]: one for one in gym.instances()}
        processes = {name: psutil.Process(one["pid"]) for name, one in before.items()}
        (node,) = cluster.worker_nodes
        raylet = dict(node.live_processes())["raylet"].pid
        lost = {name for name, process in processes.items() if raylet in {one.pid for one in process.parents()}}
        assert lost, "Ray put nothing on the second node"
        assert len(lost) < len(processes), "Ray put nothing on the first node"
        for name in ("counter", "lone"):
            assert (await asyncio.to_thread(posted, before[name]["url"]))["pid"] == before[name]["pid"]

        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        assert still_alive([processes[name] for name in lost]) == []
        await asyncio.wait_for(all_back(gym, lost), PATIENCE_S * 3)
        for one in gym.instances():
            assert one["url"] == before[one["process_name"]]["url"]
            if one["process_name"] in ("counter", "lone"):
                assert (await asyncio.to_thread(posted, one["url"]))["pid"] == one["pid"]
        return [psutil.Process(one["pid"]) for one in gym.instances()]

    async def main() -> list[psutil.Process]:
        with ReservedPorts() as ports:
            config = load_gym(GymSources(files=["all.yaml"], roots=[gym_root], overrides=overrides), ports=ports)
            async with Supervisor(config, ports, response.append) as gym:
                await asyncio.wait_for(gym.ready(), PATIENCE_S * 3)
                return await run(gym)

    left = asyncio.run(main())
    assert still_alive(left) == []
    assert "(lone) hello from lone" in response
