"""Workers on the nodes of a Ray cluster: a process, a node, or the server is lost, and nothing acknowledged is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tinker import types

from tests.placement.conftest import RayNodesHere, RayServer
from tests.server.replicas.test_faults import PROMPTS, all_begun, is_busy, tokens, up
from tests.server.replicas.test_replicas import trained
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


def test_ranks_on_different_nodes_end_at_the_bits_of_one_process(
    nodes: RayNodesHere, ray_server: Callable[..., RayServer], make_server: MakeServer
) -> None:
    settings = ("models.0.threads=1", "models.0.gradient_shards=8", "models.0.micro_batch_tokens=32")
    alone = make_server(*settings)
    expected = train(alone.client(), STEPS)
    bits = weights(alone, expected)
    assert alone.stop() == 0
    for number in (2, 3):
        nodes.add(number, num_cpus=1)
    server = ray_server(*OFTEN, *settings, "models.0.parallel.data=2")
    assert {one["address"] for one in server.nodes_of()} == {"127.0.0.2", "127.0.0.3"}
    follower = server.node_of(rank=1)

    def disturb(step: int) -> None:
        if step == 3:
            nodes.add(4, num_cpus=1)
            nodes.lose(follower)
        elif step == 7:
            server.until(lambda: follower not in [one["address"] for one in server.nodes_of()], timeout_s=100)
            nodes.add(5, num_cpus=1)
            drained.append(server.nodes_of()[0]["node"])
            nodes.drain(drained[0])

    drained: list[str] = []
    run = train(server.client(), STEPS, on_step=disturb)
    assert run.losses == expected.losses
    assert_same_bits(weights(server, run), bits)
    server.until(lambda: 'reason="moved"} 1.0' in server.metrics(), timeout_s=60)
    server.until(lambda: drained[0] not in [one["node"] for one in server.nodes_of()], timeout_s=60)
    log = server.worker_log.read_text()
    assert "rank 0] " in log
    assert "rank 1] " in log
    assert server.stop() == 0


def test_replicas_on_nodes_cost_nobody_a_sample_when_one_is_lost_and_one_drained(
    nodes: RayNodesHere, ray_server: Callable[..., RayServer]
) -> None:
    for number in (2, 3, 4):
        nodes.add(number, num_cpus=1)
    server = ray_server(*OFTEN, "models.0.replicas=2", "ray.wait_s=2", start=False)
    server.overrides.append("ray.resources.CPU=7")
    server.launch()
    server.until(lambda: server.process is not None and server.process.poll() is not None, timeout_s=100)
    assert "no node of the Ray cluster has room for" in server.said()
    assert "it needs 7 CPU; there are: " in server.said()
    assert "1 of 1 CPU free" in server.said()
    server.overrides[-1] = "ray.wait_s=100"
    server.start()
    client = server.client()
    sampler = trained(client).save_weights_and_get_sampling_client()
    expected = tokens(all_begun(sampler))
    futures = all_begun(sampler)
    lost = server.node_of("replica-0")
    (engine,) = nodes.processes(lost)
    server.until(lambda: is_busy(engine.pid))
    nodes.lose(lost)
    assert [len(one) for one in tokens(futures)] == [len(one) for one in expected]
    nodes.add(5, num_cpus=1)
    server.until(lambda: up(server) == [True, True], timeout_s=100)
    nodes.add(6, num_cpus=1)
    futures = all_begun(sampler)
    nodes.drain(server.nodes_of("replica-1")[0]["node"])
    assert len(tokens(futures)) == len(PROMPTS)
    old = server.node_of("replica-1")
    server.until(lambda: server.node_of("replica-1") != old and up(server) == [True, True], timeout_s=100)
    client.close("success").result()
    assert server.stop() == 0
