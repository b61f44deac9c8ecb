"""The official SDK over a real socket: sampling, scoring, clones."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker.lib.internal_client_holder import InternalClientHolder

from palestra.types.sampling import sample_seed
from tests.server.conftest import Server, created

PROMPT = [17, 301, 44, 5, 5, 260, 81, 12]
INPUT = types.ModelInput.from_ints(PROMPT)
ENDS = {503, 505}  # <|endoftext|> and <|im_end|>, as generation_config.json says


def params(max_tokens: int = 6, **options: Any) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=max_tokens, **options)


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def base(service: tinker.ServiceClient, server: Server) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=server.name)


@pytest.fixture(scope="module")
def reference(server: Server) -> Callable[[list[int]], torch.Tensor]:
    """The logits of transformers at every position."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32).eval()
    return lambda tokens: model(torch.tensor([tokens])).logits[0].detach()


# Where samples come from


def test_a_sampler_of_the_base_model(base, server, monkeypatch, tmp_path):
    assert base.get_base_model() == server.name
    (tmp_path / server.name).parent.mkdir(parents=True)
    (tmp_path / server.name).symlink_to(server.model)
    monkeypatch.chdir(tmp_path)  # the SDK looks for the tokenizer under the model's name
    assert base.get_tokenizer().convert_tokens_to_ids("<|im_end|>") in ENDS


def test_samplers_of_saved_weights(service, server):
    client = service.create_lora_training_client(server.name, rank=4, seed=1)
    target = types.TensorData.from_numpy(np.array(PROMPT[1:]))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT[:-1]),
        loss_fn_inputs={
            "target_tokens": target,
            "weights": types.TensorData.from_numpy(np.ones(len(PROMPT) - 1, np.float32)),
        },
    )
    for _ in range(2):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    trained = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    named = client.save_weights_for_sampler("named").result().path
    state = client.save_state("state").result().path
    samplers = [
        client.save_weights_and_get_sampling_client(),
        client.create_sampling_client(named),
        service.create_sampling_client(model_path=named),
        service.create_sampling_client(model_path=state, base_model=server.name),
    ]
    for sampler in samplers:
        scores = sampler.compute_logprobs(INPUT).result()
        np.testing.assert_allclose(scores[1:], trained, atol=1e-4)
        assert sampler.get_base_model() == server.name


def test_what_does_not_exist_is_refused_at_once(service):
    refused = (tinker.BadRequestError, tinker.NotFoundError)
    with pytest.raises(refused):
        created(service.create_sampling_client(base_model="Qwen/Qwen3-9B"))
    with pytest.raises(refused):
        created(service.create_sampling_client(model_path="tinker://nobody:train:0/sampler_weights/none"))


# What is sampled


def test_greedy_tokens_and_logprobs_agree_with_transformers(base, reference):
    (sequence,) = base.sample(INPUT, 1, params(8, temperature=0.0)).result().sequences
    tokens = list(PROMPT)
    for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True):
        scores = reference(tokens)[-1].log_softmax(-1)
        assert token == scores.argmax()
        assert logprob == pytest.approx(scores[token].item(), abs=1e-4)
        tokens.append(token)
    assert len(sequence.tokens) == 8
    assert sequence.stop_reason == "length"


def test_logprobs_are_of_the_distribution_sampled_from(base, reference):
    (sequence,) = base.sample(INPUT, 1, params(6, temperature=0.7, seed=3)).result().sequences
    tokens = list(PROMPT)
    for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True):
        assert logprob == pytest.approx((reference(tokens)[-1] / 0.7).log_softmax(-1)[token].item(), abs=1e-4)
        tokens.append(token)


def test_a_seed_repeats_and_samples_of_a_group_differ(base):
    one, two = (base.sample(INPUT, 4, params(8, seed=7)).result() for _ in range(2))
    assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]
    assert len({tuple(s.tokens) for s in one.sequences}) == 4


def test_samples_of_one_request_are_those_of_requests_with_their_seeds(base):
    together = base.sample(INPUT, 4, params(8, seed=7)).result().sequences
    alone = [base.sample(INPUT, 1, params(8, seed=sample_seed(7, n))).result().sequences[0] for n in range(4)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_top_k_of_one_is_greedy(base):
    greedy = base.sample(INPUT, 1, params(temperature=0.0)).result().sequences[0].tokens
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        assert base.sample(INPUT, 1, params(seed=1, **options)).result().sequences[0].tokens == greedy


def test_many_samples_at_once_are_all_answered(base):
    futures = [base.sample(INPUT, 1, params(4, seed=n)) for n in range(100)]
    assert all(len(f.result().sequences[0].tokens) == 4 for f in futures)


# Where they stop


@pytest.fixture(scope="module")
def greedy(base: tinker.SamplingClient) -> list[int]:
    return base.sample(INPUT, 1, params(12, temperature=0.0)).result().sequences[0].tokens


def test_a_stop_token_ends_a_sample_and_is_in_it(base, greedy):
    stop = greedy[3]
    (sequence,) = base.sample(INPUT, 1, params(12, temperature=0.0, stop=[stop])).result().sequences
    assert sequence.tokens == greedy[: greedy.index(stop) + 1]
    assert len(sequence.logprobs) == len(sequence.tokens)
    assert sequence.stop_reason == "stop"


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_ends_a_sample_and_is_in_it(base, greedy, server, as_list):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(server.model)
    stop = next(text for token in greedy[2:] if (text := tokenizer.decode([token])).isascii() and text.strip())
    request = [stop, "never said"] if as_list else stop
    (sequence,) = base.sample(INPUT, 1, params(12, temperature=0.0, stop=request)).result().sequences
    assert sequence.stop_reason == "stop"
    assert sequence.tokens == greedy[: len(sequence.tokens)]
    assert stop in tokenizer.decode(sequence.tokens)
    assert stop not in tokenizer.decode(sequence.tokens[:-1])


def test_the_models_own_end_stops_unless_nothing_may(base):
    """Enough draws that some reach the end-of-text token."""
    ended = base.sample(INPUT, 64, params(60, seed=1)).result().sequences
    endless = base.sample(INPUT, 64, params(60, seed=1, stop=[])).result().sequences
    assert {s.stop_reason for s in endless} == {"length"}
    assert all(len(s.tokens) == 60 for s in endless)
    for sequence in ended:
        assert ENDS.isdisjoint(sequence.tokens[:-1])
        assert (sequence.stop_reason == "stop") == (sequence.tokens[-1] in ENDS)
    assert any(s.stop_reason == "stop" for s in ended)


# Scores of the prompt


def test_compute_logprobs_agrees_with_transformers(base, reference):
    scores = base.compute_logprobs(INPUT).result()
    expected = reference(PROMPT)[:-1].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], expected, atol=1e-4)


def test_only_the_last_tokens_are_scored_when_asked(base):
    scores = base.compute_logprobs(INPUT).result()
    last = base.compute_logprobs(INPUT, prompt_logprobs_last_n=3).result()
    assert last[:-3] == [None] * (len(PROMPT) - 3)
    np.testing.assert_allclose(last[-3:], scores[-3:], atol=1e-4)


def test_top_tokens_of_prompt_and_sample(base, reference):
    result = base.sample(
        INPUT,
        1,
        params(2, temperature=0.0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result()
    expected = reference(PROMPT).log_softmax(-1).topk(3)
    assert result.topk_prompt_logprobs[0] is None
    for position, row in enumerate(result.topk_prompt_logprobs[1:]):
        assert [token for token, _ in row] == expected.indices[position].tolist()
        np.testing.assert_allclose([score for _, score in row], expected.values[position], atol=1e-4)
    (sequence,) = result.sequences
    best = sequence.topk_logprobs[0]
    assert [token for token, _ in best] == expected.indices[-1][:2].tolist()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_scores_of_chosen_tokens(base, reference, is_sparse):
    ids = torch.full((len(PROMPT) - 1, 8), -1, dtype=torch.int64)
    ids[2, 0], ids[6, 0], ids[6, 1] = 100, 200, 3
    target = types.TensorData.from_torch_sparse(ids, -1) if is_sparse else types.TensorData.from_torch(ids)
    assert (target.sparse_crow_indices is not None) == is_sparse
    result = base.sample(INPUT, 1, params(1), include_prompt_logprobs=True, target_prompt_logprobs=target).result()
    found, expected = result.target_prompt_logprobs.to_torch(), reference(PROMPT).log_softmax(-1)
    assert found.shape == ids.shape
    for row, column, token in ((2, 0, 100), (6, 0, 200), (6, 1, 3)):
        assert found[row, column].item() == pytest.approx(expected[row, token].item(), abs=1e-4)
    assert found[ids == -1].abs().sum() == 0


def test_other_tokens_the_prompt_could_have_had(base, reference):
    result = base.sample(INPUT, 1, params(1, seed=1), prompt_alt_tokens_k=3).result()
    tokens, scores = (t.to_torch() for t in (result.prompt_alt_tokens.tokens, result.prompt_alt_tokens.logprobs))
    assert tokens.shape == scores.shape == (len(PROMPT) - 1, 3)
    expected = reference(PROMPT)[:-1].log_softmax(-1).gather(1, tokens)
    np.testing.assert_allclose(scores, expected, atol=1e-4)


# Clones


def clone(sampler: tinker.SamplingClient) -> tinker.SamplingClient:
    return pickle.loads(pickle.dumps(sampler))  # noqa: S301


def test_a_pickled_sampler_samples_the_same(base):
    one, two = (s.sample(INPUT, 2, params(seed=5)).result() for s in (base, clone(base)))
    assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]


def test_a_sampler_handle_opens_the_sampler_elsewhere(base, server):
    other = tinker.SamplingClient.from_sampler_handle(base.get_sampler_handle(), api_key=server.key)
    np.testing.assert_allclose(
        other.compute_logprobs(INPUT).result()[1:], base.compute_logprobs(INPUT).result()[1:], atol=1e-5
    )


def test_the_completion_queue_and_joined_clones(server, monkeypatch, base):
    """With the flags that make the SDK wait for all samples of a session at once, and ask for a clone's number."""

    async def fetch(*_: object) -> types.ClientConfigResponse:
        return types.ClientConfigResponse(sample_use_retrieve_futures=True, sample_join_sampling_session=True)

    monkeypatch.setattr(InternalClientHolder, "_fetch_client_config", fetch)
    with server.client() as service:
        sampler = created(service.create_sampling_client(base_model=server.name))
        clones = [sampler, clone(sampler), clone(sampler)]
        futures = [clones[n % 3].sample(INPUT, 1, params(4, seed=n)) for n in range(60)]
        found = [f.result().sequences[0].tokens for f in futures]
        assert len({c._cloned_sampler_id for c in clones}) == 3
    assert found[:5] == [base.sample(INPUT, 1, params(4, seed=n)).result().sequences[0].tokens for n in range(5)]


# Mistakes


@pytest.mark.parametrize(
    ("prompt", "options"),
    [([], {}), ([100_000], {}), ([1] * 4096, {}), (PROMPT, {"temperature": -1.0}), (PROMPT, {"max_tokens": 0})],
)
def test_a_mistake_in_a_sample_is_told_at_once(base, prompt, options):
    request = types.SamplingParams(**{"max_tokens": 2, **options})
    refused = (tinker.RequestFailedError, tinker.BadRequestError, tinker.UnprocessableEntityError)
    with pytest.raises(refused):
        base.sample(types.ModelInput.from_ints(prompt), 1, request).result(timeout=10)
