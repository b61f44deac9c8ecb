"""A Ray cluster of nodes on this machine, each with an address of its own, and servers whose workers run on them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.conftest import Server

SOON = {  # a node that is gone is noticed in seconds
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}
CPUS = 2


class RayNodesHere:
    """The head has no room for workers; node N is 127.0.0.N."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

        os.environ.update(SOON)
        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}
        self.address: str = self._cluster.address

    def add(self, number: int, **options: Any) -> str:
        address = f"127.0.0.{number}"
        self._nodes[address] = self._cluster.add_node(**{"num_cpus": CPUS, "node_ip_address": address, **options})
        return address

    def lose(self, address: str) -> None:
        """As when a machine loses its power."""
        raylet = self._raylet(self._nodes.pop(address))
        for process in [*raylet.children(recursive=True), raylet]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def drain(self, node_id: str) -> None:
        """As an operator does before a machine is taken away."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.address]
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        left = ["--deadline-remaining-seconds", "600"]
        subprocess.run([*command, "--node-id", node_id, *reason, *left], check=True)

    def processes(self, address: str) -> list[psutil.Process]:
        """The engines on a node."""
        children = self._raylet(self._nodes[address]).children(recursive=True)
        return [one for one in children if "palestra.engine" in one.cmdline()]

    def close(self) -> None:
        self._cluster.shutdown()

    @staticmethod
    def _raylet(node: Any) -> psutil.Process:
        return psutil.Process(dict(node.live_processes())["raylet"].pid)


@pytest.fixture
def nodes() -> Iterator[RayNodesHere]:
    pytest.importorskip("ray")
    made = RayNodesHere()
    try:
        yield made
    finally:
        made.close()


class RayServer(Server):
    """A server whose workers are on the nodes."""

    def _facts(self, folder: str = "") -> dict[str, Any]:
        return json.loads((self.state / self.worker / folder / "worker.json").read_text())

    def node_of(self, folder: str = "", rank: int = 0) -> str:
        """Address of the node of the worker, or of a replica."""
        return self._facts(folder)["nodes"][rank]["address"]

    def nodes_of(self, folder: str = "") -> list[dict[str, str]]:
        return self._facts(folder)["nodes"]

    def wait_moved(self, old: str, folder: str = "") -> str:
        """Until the worker is ready on another node."""

        def has_moved() -> bool:
            return self.node_of(folder) != old and self.http().get("/readyz").status_code == 200

        self.until(has_moved, timeout_s=120)
        return self.node_of(folder)


@pytest.fixture
def ray_server(nodes: RayNodesHere, tmp_path: Path, micro_model: Path) -> Iterator[Callable[..., RayServer]]:
    made: list[RayServer] = []

    def make(*overrides: str, start: bool = True, model: Path = micro_model) -> RayServer:
        folder = tmp_path / f"on-ray-{len(made)}"
        settings = (f"ray.address={nodes.address}", f"ray.node_folder={tmp_path}/nodes", "models.0.threads=1")
        made.append(RayServer(folder, model, *settings, *overrides))
        return made[-1].start() if start else made[-1]

    yield make
    for server in made:
        server.end()
