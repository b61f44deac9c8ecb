"""A mixture of experts behind the official SDK: router metrics, and training with the experts seen while sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tinker
from tinker import types

from palestra.rollouts.policy_sampler import PolicyError
from palestra.training.policy import PolicyStart
from palestra.training.tinker_policy import TinkerPolicy
from palestra.types import AdamParams, SamplingParams
from palestra.types.rollouts import SequenceSource, TrainSequence

if TYPE_CHECKING:
    from tests.server.conftest import Server

pytestmark = pytest.mark.slow

PROMPT = [17, 301, 44, 5, 5, 260, 81, 12]


@pytest.fixture(scope="module")
def moe(make_module_server, random_model) -> Server:
    return make_module_server(model=random_model("qwen3_moe"), flags=("--name", "moe-alias"))


@pytest.fixture(scope="module")
def service(moe: Server) -> Iterator[tinker.ServiceClient]:
    with moe.client() as client:
        yield client


def datum(tokens: list[int]) -> types.Datum:
    weights = np.ones(len(tokens) - 1, np.float32)
    return types.Datum(
        types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": np.array(tokens[1:]), "weights": weights}
    )


def test_router_metrics_reach_the_client(service, moe):
    client = service.create_lora_training_client(moe.name, rank=4, seed=1)
    metrics = client.forward_backward([datum(PROMPT), datum(PROMPT[:3])], "cross_entropy").result().metrics
    assert 0 < metrics["e_frac_with_tokens:mean"] <= 1
    assert 0 < metrics["e_frac_oversubscribed:mean"] < 1
    assert metrics["e_max_violation:max"] >= metrics["e_max_violation:mean"] > 0 > metrics["e_min_violation:mean"]


def test_stock_clients_replay_the_experts_of_their_samples(service, moe):
    client = service.create_lora_training_client(moe.name, rank=4, seed=1)
    sampled = types.SamplingParams(max_tokens=6, seed=1, stop=[])
    for records in (True, False):
        sampler = client.save_weights_and_get_sampling_client(record_stability_info=records)
        answer = sampler.sample(types.ModelInput.from_ints(PROMPT), 2, sampled).result()
        data = []
        for sequence in answer.sequences:
            name, n = sequence.sequence_id, len(PROMPT)
            inputs = [
                types.PromptProvenanceSpan(sequence_id=name, length=n),
                types.SampledProvenanceSpan(sequence_id=name, length=5),
            ]
            targets = [
                types.PromptProvenanceSpan(sequence_id=name, offset=1, length=n - 1),
                types.SampledProvenanceSpan(sequence_id=name, length=6),
            ]
            data.append(datum([*PROMPT, *sequence.tokens]).with_provenance(inputs, targets))
        result = client.forward(data, "cross_entropy").result()
        assert result.metrics.get("routing_replayed:sum") == (2 * (len(PROMPT) + 5) if records else None)
        for sequence, output in zip(answer.sequences, result.loss_fn_outputs, strict=True):
            assert np.allclose(output["logprobs"].to_numpy()[-6:], sequence.logprobs, atol=1e-4)


@pytest.mark.anyio
async def test_a_policy_trains_turns_with_the_experts_they_were_sampled_with(moe, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", moe.key)
    async with TinkerPolicy.open(moe.url, moe.name, PolicyStart(rank=4, seed=1), replay_routing=True) as policy:
        sampler = await policy.publish(1)
        tokens, sources = list(PROMPT), []
        for observation in ([], [3, 4, 5]):
            tokens += observation
            (turn,) = await sampler.sample(tokens, SamplingParams(max_tokens=5, seed=2, stop_token_ids=()))
            sources.append(SequenceSource(turn.sequence_id, len(tokens), len(tokens) + 5))
            tokens += turn.tokens
        row = TrainSequence(
            tokens=tokens,
            mask=[True] * len(tokens),
            logprobs=[-1.0] * len(tokens),
            advantages=[0.1] * len(tokens),
            sources=sources,
        )
        update = await policy.update([row], "importance_sampling", {}, AdamParams())
        assert update.metrics["routing_replayed:sum"] == len(tokens) - 1


@pytest.mark.anyio
async def test_replay_is_refused_for_a_model_without_experts(server, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    with pytest.raises(PolicyError, match=f"replay_routing: the server replays no routing for {server.name}"):
        async with TinkerPolicy.open(server.url, server.name, PolicyStart(rank=4, seed=1), replay_routing=True):
            pass


def test_capabilities_name_the_models_as_served(service, moe):
    models = {model.model_name: model for model in service.get_server_capabilities().supported_models}
    assert models.keys() == {moe.name, "moe-alias"}
    assert models["moe-alias"].max_context_length == 4096
