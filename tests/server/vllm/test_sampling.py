"""Samples by a real vLLM, asked for by the official SDKs: tokens and logprobs are what the trainer says of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tinker
from tinker import types

from tests.server.conftest import created
from tests.server.vllm.conftest import MODEL, RANK, Served, Vllm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROMPT = [39, 422, 100, 300, 18, 77, 90, 15, 15, 1200]
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
NEAR = 2e-3  # two engines in float32, one of them with other kernels


@pytest.fixture(scope="module")
def service(pair: Served) -> Iterator[tinker.ServiceClient]:
    client = pair.client()
    yield client
    client.close("success").result()


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A few steps away from the base model."""
    training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1, train_unembed=False)
    learn(training, PROMPT * 3, steps=4)
    return training


def learn(training: tinker.TrainingClient, tokens: list[int], steps: int = 1) -> None:
    for _ in range(steps):
        passed = training.forward_backward([datum(tokens)], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=5e-3))
        passed.result()
        stepped.result()


def datum(tokens: list[int]) -> types.Datum:
    n = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[n]),
            "weights": types.TensorData(data=[1.0] * n, dtype="float32", shape=[n]),
        },
    )


def own_logprobs(training: tinker.TrainingClient, prompt: list[int], tokens: list[int]) -> list[float]:
    """By the trainer, which is not vLLM."""
    output = training.forward([datum([*prompt, *tokens])], "cross_entropy").result()
    return list(output.loss_fn_outputs[0]["logprobs"].data)[-len(tokens) :]


def sample(sampler: tinker.SamplingClient, prompt: list[int] = PROMPT, count: int = 1, **params: Any) -> Any:
    expected = types.SamplingParams(**{"max_tokens": 24, "temperature": 1.0, "stop": []} | params)
    return sampler.sample(types.ModelInput.from_ints(prompt), num_samples=count, sampling_params=expected).result()


# By Tinker's SDK


def test_sampled_tokens_have_the_logprobs_the_trainer_gives_them(trained: tinker.TrainingClient):
    sampler = trained.save_weights_and_get_sampling_client()
    for sequence in sample(sampler, count=3).sequences:
        assert len(sequence.tokens) == 24
        assert sequence.logprobs == pytest.approx(own_logprobs(trained, PROMPT, sequence.tokens), abs=NEAR)
        scored = sampler.compute_logprobs(types.ModelInput.from_ints([*PROMPT, *sequence.tokens])).result()
        assert scored[0] is None
        assert sequence.logprobs == pytest.approx(scored[len(PROMPT) :], abs=NEAR)


def test_a_sampler_keeps_its_weights_while_training_goes_on(trained: tinker.TrainingClient):
    before = trained.save_weights_and_get_sampling_client()
    drawn = sample(before).sequences[0]
    learn(trained, PROMPT * 2)
    after = trained.save_weights_and_get_sampling_client()
    newer = own_logprobs(trained, PROMPT, drawn.tokens)
    tokens = types.ModelInput.from_ints([*PROMPT, *drawn.tokens])
    assert before.compute_logprobs(tokens).result()[len(PROMPT) :] == pytest.approx(drawn.logprobs, abs=NEAR)
    assert after.compute_logprobs(tokens).result()[len(PROMPT) :] == pytest.approx(newer, abs=NEAR)
    assert newer != pytest.approx(drawn.logprobs, abs=NEAR)


def test_more_adapters_than_are_loaded_at_once_all_answer(
    pair: Served, trained: tinker.TrainingClient, vllms: tuple[Vllm, Vllm]
):
    others = {name for vllm in vllms for name in vllm.adapters}
    saved = []
    for _ in range(6):
        learn(trained, PROMPT * 2)
        saved.append((trained.save_weights_and_get_sampling_client(), own_logprobs(trained, PROMPT, PROMPT)))
    for sampler, logprobs in (*saved, *reversed(saved)):
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT * 2)).result()
        assert scored[len(PROMPT) :] == pytest.approx(logprobs, abs=NEAR)
    (ours,) = {name.rpartition("-")[0] for vllm in vllms for name in vllm.adapters if name not in others}
    pair.until(lambda: all(sum(name.startswith(ours) for name in vllm.adapters) <= 4 for vllm in vllms))


def test_the_end_of_a_session_takes_its_adapters_along(pair: Served, vllms: tuple[Vllm, Vllm]):
    service = pair.client()
    training = service.create_lora_training_client(base_model=MODEL, rank=4, train_unembed=False)
    before = {name for vllm in vllms for name in vllm.adapters}
    sample(training.save_weights_and_get_sampling_client())
    pair.until(lambda: all(set(vllm.adapters) - before for vllm in vllms))  # pushed to both
    (mine,) = {name for vllm in vllms for name in vllm.adapters} - before
    service.close("success").result()
    pair.until(lambda: not any(mine in vllm.adapters for vllm in vllms))


def test_adapters_come_over_http_and_no_folder_is_shared(
    pair: Served, trained: tinker.TrainingClient, vllms: tuple[Vllm, Vllm]
):
    sample(trained.save_weights_and_get_sampling_client())
    for vllm in vllms:
        roots = [m["root"] for m in vllm.http.get("/v1/models").json()["data"] if m["parent"] is not None]
        assert roots
        assert not [root for root in roots if root.startswith(str(pair.folder))]


def test_an_adapter_that_vllm_cannot_serve_is_refused_when_the_model_is_made(service: tinker.ServiceClient):
    with pytest.raises(tinker.APIStatusError, match=rf"rank 32 is more.*at most {RANK}"):
        created(service.create_lora_training_client(base_model=MODEL, rank=32, train_unembed=False))
    with pytest.raises(tinker.APIStatusError, match="set train_unembed=False"):
        created(service.create_lora_training_client(base_model=MODEL, rank=4))


def test_scores_are_of_the_right_adapter_while_others_sample(trained: tinker.TrainingClient, pair: Served):
    """vLLM mixes them up where adapters may change lm_head, and its CPU build where a request has no adapter."""
    base = pair.client().create_sampling_client(base_model=MODEL)
    adapter, prompt = trained.save_weights_and_get_sampling_client(), types.ModelInput.from_ints(PROMPT * 2)
    alone = [sampler.compute_logprobs(prompt).result()[1:] for sampler in (base, adapter)]
    expected = types.SamplingParams(max_tokens=300, temperature=1.0, stop=[])
    others = [s.sample(prompt, num_samples=2, sampling_params=expected) for s in (base, adapter)]
    for _ in range(5):
        mixed = [sampler.compute_logprobs(prompt) for sampler in (base, adapter)]
        for scored, was in zip(mixed, alone, strict=True):
            assert scored.result()[1:] == pytest.approx(was, abs=NEAR)
    assert [len(other.result().sequences) for other in others] == [2, 2]


def test_logprobs_are_before_filters_and_at_the_temperature(trained: tinker.TrainingClient):
    sampler = trained.save_weights_and_get_sampling_client()
    for params in ({"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0}):
        sequence = sample(sampler, **params).sequences[0]
        assert sequence.logprobs == pytest.approx(own_logprobs(trained, PROMPT, sequence.tokens), abs=NEAR), params
    cold = sample(sampler, temperature=0.5).sequences[0]
    assert cold.logprobs != pytest.approx(own_logprobs(trained, PROMPT, cold.tokens), abs=NEAR)
    with pytest.raises(tinker.APIStatusError, match=r"temperature 0\.5 with top_p"):
        sample(sampler, temperature=0.5, top_p=0.9)


def test_what_stops_a_sequence_is_part_of_it(trained: tinker.TrainingClient):
    sampler = trained.save_weights_and_get_sampling_client()
    drawn = sample(sampler, seed=3).sequences[0]
    stop = drawn.tokens[5]
    stopped = sample(sampler, seed=3, stop=[stop]).sequences[0]
    assert stopped.tokens == drawn.tokens[: drawn.tokens.index(stop) + 1]
    assert stopped.stop_reason == "stop"
    assert drawn.stop_reason == "length"


# By OpenAI's SDK


@pytest.fixture(scope="module")
def client(pair: Served) -> Iterator[openai.OpenAI]:
    with pair.openai() as client:
        yield client


@pytest.fixture(scope="module")
def path(trained: tinker.TrainingClient) -> str:
    found = trained.save_weights_for_sampler("for-chat").result().path
    assert found.startswith("tinker://")
    return found


def turns(pair: Served, trace_id: str) -> list[dict[str, Any]]:
    return pair.http().get(f"/v1/traces/{trace_id}").json()["turns"]


def said(turn: dict[str, Any]) -> list[int]:
    return [*turn["prompt"], *turn["samples"][0]["tokens"]]


def drawn_at(vllms: tuple[Vllm, Vllm]) -> list[float]:
    return [vllm.count("vllm:generation_tokens_total") for vllm in vllms]


def are_idle(vllms: tuple[Vllm, Vllm]) -> bool:
    return not any(vllm.count("vllm:num_requests_running") for vllm in vllms)


def go_on(client: openai.OpenAI, tokens: int) -> Any:
    """A stream of so many."""
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Go on"}],
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def test_a_conversation_goes_on_token_for_token_at_the_server_where_it_began(
    pair: Served, client: openai.OpenAI, path: str, vllms: tuple[Vllm, Vllm]
):
    """It begins while the first server is busy, which is free afterwards."""
    pair.until(lambda: are_idle(vllms), timeout_s=60)
    messages: list[Any] = [{"role": "user", "content": "Count to three in a loud voice"}]
    homes, trace_id = [], ""
    with go_on(client, 1900) as stream:
        next(iter(stream))
        before = drawn_at(vllms)
        answer = client.chat.completions.create(model=path, messages=messages, max_tokens=24)
        pair.until(lambda: drawn_at(vllms)[1] > before[1])
    pair.until(lambda: are_idle(vllms), timeout_s=60)
    for _ in range(3):
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "And again, louder"})
        before = drawn_at(vllms)
        answer = client.chat.completions.create(model=path, messages=messages, max_tokens=24)
        pair.until(lambda before=before: drawn_at(vllms) != before)
        homes += [n for n, (was, now) in enumerate(zip(before, drawn_at(vllms), strict=True)) if now > was]
        trace_id = answer.trace_id  # type: ignore[attr-defined]
    assert homes == [1, 1, 1]
    trace = turns(pair, trace_id)
    assert len(trace) == 4
    for earlier, later in itertools.pairwise(trace):
        assert later["prompt"][: len(said(earlier))] == said(earlier)


def test_a_client_that_leaves_ends_the_sampling_at_vllm(pair: Served, client: openai.OpenAI, vllms: tuple[Vllm, Vllm]):
    before = sum(drawn_at(vllms))
    with go_on(client, 1900) as stream:
        next(iter(stream))
    pair.until(lambda: are_idle(vllms), timeout_s=60)
    assert sum(drawn_at(vllms)) - before < 1900


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, path: str):
    request: dict[str, Any] = {
        "model": path,
        "messages": [{"role": "user", "content": "Tell me of ships"}],
        "max_tokens": 24,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**request).choices[0]
    chunks = [c.choices[0] for c in client.chat.completions.create(**request, stream=True) if c.choices]
    assert len(chunks) > 2
    assert "".join(c.delta.content or "" for c in chunks) == (whole.message.content or "")
    assert whole.logprobs is not None
    streamed = [token for c in chunks if c.logprobs for token in c.logprobs.content or []]
    assert [t.token for t in streamed] == [t.token for t in whole.logprobs.content or []]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in whole.logprobs.content or []], abs=NEAR)


def test_a_schema_is_followed(client: openai.OpenAI):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A number"}],
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": schema, "strict": True}},
        extra_body=NO_THOUGHTS,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content or "")["n"] in (1, 2)


def test_a_call_that_is_required_is_made(client: openai.OpenAI):
    properties = {"n": {"enum": [1, 2]}}
    parameters = {"type": "object", "properties": properties, "required": ["n"], "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": "pick", "parameters": parameters}}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A number"}],
        max_tokens=200,
        tools=tools,
        tool_choice="required",
        extra_body=NO_THOUGHTS,
    )
    (call, *_) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "pick"
    assert json.loads(call.function.arguments)["n"] in (1, 2)


def test_what_vllm_cannot_do_is_a_400_that_names_it(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match=r"temperature 0\.7 with top_p"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=0.7, top_p=0.9
        )
