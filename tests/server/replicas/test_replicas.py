"""Two replicas on this machine: the trainer's bits, versions in order, groups together."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tinker
from tinker import types

from tests.server.conftest import NAME, Server

FEW, ADAPTER_BYTES = 3, 50_000
PROMPTS = [[n, 7, 3 + n, 1, n] for n in range(8)]


@pytest.fixture(scope="module")
def pair(make_module_server: Callable[..., Server]) -> Server:
    """Few adapters fit at once, so that they have to come and go."""
    few = {"limits.max_adapter_bytes": FEW * ADAPTER_BYTES, "models.0.replicas": {"count": 2, "max_adapters": FEW}}
    return make_module_server("models.0.threads=1", **few)


@pytest.fixture
def service(pair: Server) -> Iterator[tinker.ServiceClient]:
    client = pair.client()
    yield client
    client.close("success").result()


def learn(training: tinker.TrainingClient, tokens: list[int]) -> None:
    n = len(tokens) - 1
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[n]),
            "weights": types.TensorData(data=[1.0] * n, dtype="float32", shape=[n]),
        },
    )
    passed = training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    passed.result()


def begin(sampler: tinker.SamplingClient, prompt: list[int], count: int = 1, **params: Any) -> Any:
    expected = types.SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "stop": [], "seed": 5} | params)
    return sampler.sample(types.ModelInput.from_ints(prompt), num_samples=count, sampling_params=expected)


def drawn(sampler: tinker.SamplingClient) -> list[types.SampledSequence]:
    futures = [begin(sampler, prompt, 2) for prompt in PROMPTS]
    return [sequence for future in futures for sequence in future.result().sequences]


def answered(server: Server) -> list[int]:
    """Requests that each replica has answered."""
    found = re.findall(r'palestra_replica_samples_total\{.*replica="(\d+)"\} (\d+)', server.metrics())
    counts = {int(number): int(count) for number, count in found}
    return [counts.get(number, 0) for number in range(2)]


def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    training = service.create_lora_training_client(base_model=NAME, rank=4, seed=1)
    learn(training, list(range(20)))
    return training


def test_seeded_samples_are_those_of_the_trainers_own_sampler(pair: Server, server: Server, service: Any):
    """The same tokens from an adapter, a checkpoint and the base model, by either replica. Logprobs may differ in the
    last bits, as they do with the batch on a CPU."""
    own, found = server.client(), []
    before = answered(pair)
    for client in (own, service):
        training = trained(client)
        path = training.save_weights_for_sampler("checkpoint").result().path
        samplers = [training.save_weights_and_get_sampling_client(), client.create_sampling_client(model_path=path)]
        samplers.append(client.create_sampling_client(base_model=NAME))
        found.append([drawn(sampler) for sampler in samplers])
    expected, sampled = found
    tokens = [[sequence.tokens for sequence in one] for one in sampled]
    assert tokens == [[sequence.tokens for sequence in one] for one in expected]
    assert tokens[0] == tokens[1] != tokens[2]
    for one, other in zip(itertools.chain(*expected), itertools.chain(*sampled), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert all(after > was for was, after in zip(before, answered(pair), strict=True))
    own.close("success").result()


def test_each_sample_is_of_its_version_of_the_weights(pair: Server, service: tinker.ServiceClient):
    """Samplers of four versions, asked in turns and all at once: none of them mixes up its weights."""
    training, saved, scores = trained(service), [], []
    for step in range(4):
        learn(training, [step, *range(30)])
        saved.append(training.save_weights_and_get_sampling_client())
        scores.append(saved[-1].compute_logprobs(types.ModelInput.from_ints(PROMPTS[1] * 3)).result()[1:])
    assert len({tuple(score) for score in scores}) == 4
    futures = [
        (n, saved[n].compute_logprobs(types.ModelInput.from_ints(PROMPTS[1] * 3))) for _ in range(4) for n in range(4)
    ]
    for n, future in futures:
        assert future.result()[1:] == scores[n]


def test_more_adapters_than_there_is_room_for_all_answer(pair: Server, service: tinker.ServiceClient):
    training, prompt, saved = trained(service), types.ModelInput.from_ints(PROMPTS[2] * 3), []
    for step in range(2 * FEW):
        learn(training, [step, step, *range(10)])
        sampler = training.save_weights_and_get_sampling_client()
        saved.append((sampler, sampler.compute_logprobs(prompt).result()[1:]))
    for sampler, score in (*saved, *reversed(saved)):
        assert sampler.compute_logprobs(prompt).result()[1:] == score
    assert len({tuple(score) for _, score in saved}) == 2 * FEW
    assert len(list((pair.state / "adapters").iterdir())) <= FEW
    folders = [pair.state / pair.worker / f"replica-{n}" / "adapters" for n in range(2)]
    pair.until(lambda: all(len(list(folder.iterdir())) <= FEW for folder in folders))


def test_samples_of_one_prompt_stay_together(pair: Server, service: tinker.ServiceClient):
    sampler = service.create_sampling_client(base_model=NAME)
    before = answered(pair)
    for future in [begin(sampler, PROMPTS[3], seed=n, max_tokens=200) for n in range(6)]:
        assert len(future.result().sequences[0].tokens) == 200
    grown = sorted(after - was for was, after in zip(before, answered(pair), strict=True))
    assert grown == [0, 6]


def test_an_adapter_goes_with_its_session(pair: Server):
    client = pair.client()
    training = trained(client)
    learn(training, [9, 9, 9, 9])  # weights that no other test has
    begin(training.save_weights_and_get_sampling_client(), PROMPTS[0]).result()
    folders = [pair.state / pair.worker / f"replica-{n}" / "adapters" for n in range(2)]
    pair.until(lambda: all(list(folder.iterdir()) for folder in folders))  # pushed to both
    others = [set(folder.iterdir()) for folder in folders]
    client.close("success").result()
    pair.until(lambda: all(set(folder.iterdir()) < was for folder, was in zip(folders, others, strict=True)))


def test_an_adapter_is_served_over_http_in_ranges(pair: Server, service: tinker.ServiceClient):
    """As vLLM servers fetch it."""
    training = trained(service)
    learn(training, [8, 8, 8, 8])
    begin(training.save_weights_and_get_sampling_client(), PROMPTS[0]).result()
    newest = max((pair.state / "adapters").iterdir(), key=lambda file: file.stat().st_mtime)
    url, whole = f"/engine/adapters/{newest.stem}", newest.read_bytes()
    assert pair.http().get(url).content == whole
    part = pair.http().get(url, headers={"Range": "bytes=1000-"})
    assert (part.status_code, part.content) == (206, whole[1000:])
    assert hashlib.sha256(whole).hexdigest() == newest.stem


def test_what_a_replica_cannot_do_is_the_callers_error(service: tinker.ServiceClient):
    sampler = service.create_sampling_client(base_model=NAME)
    with pytest.raises(tinker.RequestFailedError, match="vocabulary"):
        begin(sampler, [10**6]).result()
