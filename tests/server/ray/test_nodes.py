"""Workers on the nodes of a Ray cluster: a process, a node, or the server is lost, and nothing acknowledged is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tinker import types

from tests.server.ray.conftest import RayNodesHere, RayServer
from tests.server.test_faults import assert_same_bits, train, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 10
OFTEN = ("models.0.snapshot_every_s=0.3", "models.0.snapshot_copy_s=0.5")
MakeServer = Callable[..., Any]


def test_a_run_survives_its_process_its_server_and_its_node_at_the_same_bits(
    nodes: RayNodesHere, ray_server: Callable[..., RayServer], make_server: MakeServer
) -> None:
    alone = make_server("models.0.threads=1")
    expected = train(alone.client(), STEPS)
    bits = weights(alone, expected)
    assert alone.stop() == 0
    for number in (2, 3):
        nodes.add(number)
    server = ray_server(*OFTEN)
    first = server.node_of()
    assert first in ("127.0.0.2", "127.0.0.3")

    def disturb(step: int) -> None:
        if step == 2:
            (engine,) = nodes.processes(first)
            engine.kill()
        elif step == 4:
            server.restart()
            assert "adopted a running worker" in server.said()
        elif step == 6:
            server.until(lambda: any((server.state / server.worker / "models").glob("*.snapshot")))
            nodes.lose(server.node_of())

    run = train(server.client(), STEPS, on_step=disturb)
    assert server.wait_moved(first) != first
    assert run.losses == expected.losses
    assert_same_bits(weights(server, run), bits)
    sampler = server.client().create_sampling_client(run.path)
    answer = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=5))
    assert len(answer.result(timeout=100).sequences) == 2
    assert f"[{server.node_of()} rank 0]" in server.worker_log.read_text()
    assert server.stop() == 0
