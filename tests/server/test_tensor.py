"""A model whose layers two processes compute together, behind a real server: clients see what one process gives them,
and at most a pause when one of the two dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.server.test_faults import assert_same_bits, weights
from tests.server.test_ranks import RANKS, ranks_of, train, train_while_ranks_die

pytestmark = pytest.mark.distributed

MakeServer = Callable[..., Any]
TENSOR = (*RANKS, "models.0.parallel.tensor=2")
STEPS, KILLS = 24, 6


def sample(client: tinker.ServiceClient, path: str | None = None) -> list[types.SampledSequence]:
    """Sixteen sequences, greedy and seeded."""
    sampler = client.create_sampling_client(model_path=path, base_model=None if path else "Qwen/Qwen3-8B")
    futures = []
    for number in range(8):
        prompt = types.ModelInput.from_ints(np.random.default_rng(number).integers(5, 300, 4 + 9 * number).tolist())
        params = types.SamplingParams(max_tokens=30, temperature=number % 2, seed=number)
        futures.append(sampler.sample(prompt, 2, params))
    return [sequence for future in futures for sequence in future.result(timeout=200).sequences]


def assert_same_tokens(ours: list[types.SampledSequence], theirs: list[types.SampledSequence]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs or [], other.logprobs or [], atol=1e-5)


def test_clients_get_the_tokens_and_weights_of_one_process_whichever_rank_dies(make_server: MakeServer) -> None:
    alone = make_server(*RANKS)
    run = train(alone.client(), STEPS)
    tokens, expected = [sample(alone.client()), sample(alone.client(), run.path)], weights(alone, run)
    assert alone.stop() == 0

    calm = make_server(*TENSOR)
    assert len(ranks_of(calm)) == 2
    undisturbed = train(calm.client(), STEPS)
    bits = weights(calm, undisturbed)
    np.testing.assert_allclose(undisturbed.losses, run.losses, rtol=1e-5)
    for name, value in expected.items():
        if name.startswith("adapter_model"):
            np.testing.assert_allclose(bits[name], value, atol=1e-5, err_msg=name)
    assert_same_tokens(sample(calm.client()), tokens[0])
    assert calm.stop() == 0

    server = make_server(*TENSOR, "models.0.snapshot_every_s=0.5")
    disturbed = train_while_ranks_die(server, STEPS, KILLS)
    assert disturbed.losses == undisturbed.losses
    assert_same_bits(weights(server, disturbed), bits)
    assert server.stop() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_while_it_samples_costs_nobody_a_sample(make_server: MakeServer, rank: int) -> None:
    server = make_server(*TENSOR)
    sampler = server.client().create_sampling_client(base_model="Qwen/Qwen3-8B")
    prompts = [types.ModelInput.from_ints([5, 6, 7 + n]) for n in range(4)]
    params = types.SamplingParams(max_tokens=600, temperature=0.0)
    before = sampler.sample(prompts[0], 1, params).result(timeout=100).sequences[0].tokens
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    time.sleep(0.3)
    first = server.worker_pid
    ranks_of(server)[rank].kill()
    answers = [future.result(timeout=200) for future in futures]
    assert answers[0].sequences[0].tokens == before
    assert server.wait_worker(other_than=first)


def test_a_model_that_cannot_be_divided_is_refused_at_the_start(make_server: MakeServer, random_model: Any) -> None:
    model: Path = random_model("qwen3_5")
    server = make_server(*TENSOR, model=model, start=False)
    server.launch()
    server.until(lambda: server.process.poll() is not None, timeout_s=100)
    assert "they have recurrent layers; leave parallel.tensor out" in server.said()
