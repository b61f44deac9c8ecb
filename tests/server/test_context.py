"""Sequences whose tokens two processes train together, behind a real server: clients see what one process gives them,
and at most a pause when one of the two dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.server.test_faults import assert_same_bits, weights
from tests.server.test_ranks import RANKS, batch, ranks_of, train, train_while_ranks_die

pytestmark = pytest.mark.distributed

MakeServer = Callable[..., Any]
CONTEXT = (*RANKS, "models.0.parallel.context=2")
STEPS, KILLS = 16, 4


def own_loss(client: tinker.ServiceClient) -> tuple[list[Any], dict[str, float]]:
    """A loss of the client's own, which gets the log-probabilities of all positions and sends back their weights."""
    import torch

    model = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=3)
    seen: list[Any] = []

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        seen.extend(one.detach().numpy().copy() for one in logprobs)
        return -torch.stack([one.sigmoid().sum() for one in logprobs]).sum(), {"sequences": float(len(data))}

    metrics: dict[str, float] = {}
    for step in range(3):
        metrics |= model.forward_backward_custom(batch(step, 5), loss).result(timeout=200).metrics
        metrics |= model.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=200).metrics or {}
    return seen, metrics


def test_clients_get_the_losses_and_weights_of_one_process_whichever_rank_dies(make_server: MakeServer) -> None:
    alone = make_server(*RANKS)
    run, own = train(alone.client(), STEPS), own_loss(alone.client())
    expected = weights(alone, run)
    assert alone.stop() == 0

    calm = make_server(*CONTEXT)
    assert len(ranks_of(calm)) == 2
    undisturbed, own_too = train(calm.client(), STEPS), own_loss(calm.client())
    bits = weights(calm, undisturbed)
    np.testing.assert_allclose(undisturbed.losses, run.losses, rtol=1e-5)
    for name, value in expected.items():
        if name.startswith("adapter_model"):
            np.testing.assert_allclose(bits[name], value, atol=1e-5, err_msg=name)
    for ours, theirs in zip(own_too[0], own[0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)
    assert own_too[1] == pytest.approx(own[1], rel=1e-4)
    assert calm.stop() == 0

    server = make_server(*CONTEXT, "models.0.snapshot_every_s=0.5")
    disturbed = train_while_ranks_die(server, STEPS, KILLS)
    assert disturbed.losses == undisturbed.losses
    assert_same_bits(weights(server, disturbed), bits)
    assert server.stop() == 0
