"""The paged sampler: transformers' tokens, the trainer's log-probabilities, pages shared and never mixed up."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from palestra.model import Decoder, Sampler
from palestra.model.training import head
from palestra.types import AdamParams, SampleResult
from tests.model.conftest import GEMMA4

EQUAL = 3e-5  # float32, summed in another order: how far that goes depends on the CPU
MODELS = {
    "qwen3": {"family": "qwen3"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "qwen2-windows": {
        "family": "qwen2",
        "overrides": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    },
    "llama2": {"family": "llama", "overrides": {"num_key_value_heads": 4}},
    "llama3": {
        "family": "llama",
        "tie": True,
        "overrides": {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    },
    "mistral": {"family": "mistral", "overrides": {"sliding_window": 9}},
    "qwen3_5": {"family": "qwen3_5"},
    "nemotron_h": {"family": "nemotron_h"},
    "gemma4": {"family": "gemma4", "tie": True, "overrides": GEMMA4},
}
SLOW = ("llama2", "llama3", "mistral")
"""Their logits are those of transformers every day, in `test_families`, and their kind of window is that of Qwen2."""
each_model = pytest.mark.parametrize(
    "model", [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in MODELS]
)


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [s.tokens for s in result.sequences]


# Against transformers


def likeliest_after(reference, prompt: list[int], tokens: list[int]) -> list[int]:
    """What the reference would say at the place of each of the tokens: where it is these, they are its greedy ones."""
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([prompt + tokens[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


@each_model
def test_greedy_equals_transformers_token_by_token(get_bench, model):
    bench = get_bench(**MODELS[model])
    shared = bench.tokens(37)
    prompts = [bench.tokens(n) for n in (1, 33, 64)] + [shared + bench.tokens(n) for n in (1, 20)] + [shared]
    truth: list[list[int]] = []
    for prefill_tokens in (7, 40, 2048):
        sampler = bench.sampler(prefill_tokens=prefill_tokens)
        results = sampler.generate([bench.request(p, temperature=0.0, max_tokens=16) for p in prompts])
        found = [result.sequences[0].tokens for result in results]
        assert {len(tokens) for tokens in found} == {16}
        truth = truth or [likeliest_after(bench.reference(), p, t) for p, t in zip(prompts, found, strict=True)]
        assert found == truth, prefill_tokens
        bench.check_nothing_left(sampler)


def test_greedy_with_an_adapter_equals_peft_token_by_token(bench, tmp_path):
    adapter = bench.adapter()
    peft_model = bench.peft(adapter, tmp_path / "a").eval()
    for prompt in (bench.tokens(5), bench.tokens(40)):
        result = bench.sampler().generate([bench.request(prompt, temperature=0.0, max_tokens=20)], [adapter])[0]
        (sequence,) = result.sequences
        assert len(sequence.tokens) == 20
        assert sequence.tokens == likeliest_after(peft_model, prompt, sequence.tokens)


@each_model
def test_prompt_logprobs_equal_transformers(get_bench, model):
    bench = get_bench(**MODELS[model])
    prompts = [bench.tokens(n) for n in (1, 2, 45)]
    sampler = bench.sampler(prefill_tokens=16)
    wishes = [
        bench.request(p, prompt_logprobs=True, topk_prompt_logprobs=4, max_tokens=2, temperature=0.3) for p in prompts
    ]
    for prompt, result in zip(prompts, sampler.generate([*wishes, *wishes])[3:], strict=True):
        with torch.no_grad():
            truth = torch.log_softmax(bench.reference()(torch.tensor([prompt])).logits[0], -1)
        assert result.prompt_logprobs is not None
        assert result.topk_prompt_logprobs is not None
        assert len(result.prompt_logprobs) == len(result.topk_prompt_logprobs) == len(prompt)
        assert result.prompt_logprobs[0] is None
        assert result.topk_prompt_logprobs[0] is None
        for i in range(1, len(prompt)):
            assert result.prompt_logprobs[i] == pytest.approx(truth[i - 1, prompt[i]].item(), abs=1e-4)
            top = truth[i - 1].topk(4)
            assert list(result.topk_prompt_logprobs[i].token_ids) == top.indices.tolist()
            assert result.topk_prompt_logprobs[i].logprobs == pytest.approx(top.values.tolist(), abs=1e-4)
    bench.check_nothing_left(sampler)


def test_only_what_was_asked_for_comes_back(bench):
    plain, with_logprobs, with_top, sampled_top = bench.sampler().generate(
        [
            bench.request([1, 2, 3]),
            bench.request([1, 2, 3], prompt_logprobs=True),
            bench.request([1, 2, 3], topk_prompt_logprobs=2),
            bench.request([1, 2, 3], topk_logprobs=2),
        ]
    )
    assert (plain.prompt_logprobs, plain.topk_prompt_logprobs, plain.sequences[0].topk_logprobs) == (None, None, [])
    assert with_logprobs.prompt_logprobs is not None
    assert with_logprobs.topk_prompt_logprobs is None
    assert with_top.prompt_logprobs is None
    assert with_top.topk_prompt_logprobs is not None
    assert [len(t.token_ids) for t in sampled_top.sequences[0].topk_logprobs] == [2] * 12
    assert tokens_of(plain) == tokens_of(with_logprobs) == tokens_of(with_top) == tokens_of(sampled_top)


# Against the training forward


@each_model
@pytest.mark.parametrize("with_adapter", [False, True], ids=["base", "adapter"])
def test_logprobs_at_temperature_one_equal_the_training_forward(get_bench, model, with_adapter):
    bench = get_bench(**MODELS[model])
    adapter = bench.adapter(noise=0.05) if with_adapter else None
    prompt = bench.tokens(70)
    sampler = bench.sampler(prefill_tokens=33)
    for result in sampler.generate([bench.request(prompt, n=3, max_tokens=12, prompt_logprobs=True)] * 2, adapter):
        for sequence in result.sequences:
            truth = bench.logprobs(adapter, prompt + sequence.tokens)
            assert np.abs(truth[len(prompt) - 1 :] - sequence.logprobs).max() < EQUAL
            assert np.abs(truth[: len(prompt) - 1] - result.prompt_logprobs[1:]).max() < EQUAL


def test_many_samples_of_a_long_prompt_equal_the_training_forward(bench):
    """Long enough that the shared prefix is read as one product for the group; groups of different shape."""
    adapter = bench.adapter(noise=0.05)
    prompts = [bench.tokens(n) for n in (300, 170, 40)]
    sampler = bench.sampler(cache_tokens=8192)
    wishes = [bench.request(p, n=n, max_tokens=m) for p, n, m in zip(prompts, (6, 9, 1), (20, 9, 30), strict=True)]
    for prompt, result in zip(prompts, sampler.generate(wishes, [adapter, None, adapter]), strict=True):
        owner = None if prompt is prompts[1] else adapter
        for sequence in result.sequences:
            truth = bench.logprobs(owner, prompt + sequence.tokens)
            assert np.abs(truth[len(prompt) - 1 :] - sequence.logprobs).max() < EQUAL


@pytest.mark.parametrize("temperature", [0.5, 1.7])
@pytest.mark.parametrize("raw", [False, True])
def test_logprobs_at_another_temperature_are_of_the_scaled_distribution_and_raw(bench, temperature, raw):
    prompt = bench.tokens(12)
    wish = bench.request(prompt, temperature=temperature, raw_logprobs=raw, top_k=50, top_p=0.9, topk_logprobs=3)
    sequence = bench.sampler().generate([wish])[0].sequences[0]
    with torch.no_grad():
        logits = bench.reference()(torch.tensor([prompt + sequence.tokens])).logits[0, len(prompt) - 1 : -1].double()
    scaled = torch.log_softmax(logits / temperature, -1)
    truth = torch.log_softmax(logits, -1) if raw else scaled
    assert len(sequence.raw_logprobs) == (len(sequence.tokens) if raw else 0)
    for i, token in enumerate(sequence.tokens):
        assert sequence.logprobs[i] == pytest.approx(scaled[i, token].item(), abs=2e-5)
        assert not raw or sequence.raw_logprobs[i] == pytest.approx(truth[i, token].item(), abs=2e-5)
        top = truth[i].topk(3)
        assert list(sequence.topk_logprobs[i].token_ids) == top.indices.tolist()
        assert sequence.topk_logprobs[i].logprobs == pytest.approx(top.values.tolist(), abs=2e-5)


def test_bfloat16_samples_what_it_trains_on(get_bench):
    bench = get_bench(dtype="bfloat16")
    adapter, prompt = bench.adapter(noise=0.05), bench.tokens(40)
    sampler = bench.sampler(prefill_tokens=16)
    for owner in (adapter, None):
        for sequence in sampler.generate([bench.request(prompt, n=3, max_tokens=20)], owner)[0].sequences:
            truth = bench.logprobs(owner, prompt + sequence.tokens)[len(prompt) - 1 :]
            assert np.abs(truth - sequence.logprobs).mean() < 0.05


# Pages and prefixes


class CountingDecoder(Decoder):
    computed = 0

    def __call__(self, tokens, *args, **kwargs):
        self.computed += len(tokens)
        return super().__call__(tokens, *args, **kwargs)


def counting_sampler(bench, **options):
    decoder = CountingDecoder(bench.model.spec, bench.model.decoder.weights)
    return decoder, Sampler(decoder, bench.pool, cache_tokens=2048, **options)


def test_samples_of_one_prompt_compute_it_once(bench):
    decoder, sampler = counting_sampler(bench)
    sampler.generate([bench.request(bench.tokens(100), n=8, max_tokens=5)])
    assert decoder.computed == 100 + 8 * 4


def test_later_request_with_the_same_prefix_reuses_its_pages(bench):
    decoder, sampler = counting_sampler(bench, page_size=16)
    prefix = bench.tokens(64)
    first = sampler.generate([bench.request([*prefix, 1, 2, 3])])[0]
    assert first.cached_prompt_tokens == 0
    decoder.computed = 0
    sampler.generate([bench.request([*prefix, 9, 9, 9, 9], max_tokens=3)])
    assert decoder.computed == 4 + 2
    results = sampler.generate(
        [bench.request([*prefix, 1, 2, 3]), bench.request(prefix[:40]), bench.request([7, *prefix])]
    )
    assert [r.cached_prompt_tokens for r in results] == [64, 32, 0]
    assert tokens_of(results[0]) == tokens_of(first)
    bench.check_nothing_left(sampler)


def test_a_conversation_goes_on_from_its_cached_answer(bench):
    sampler, prompt = bench.sampler(page_size=8), bench.tokens(24)
    answer = sampler.generate([bench.request(prompt, max_tokens=17)])[0].sequences[0].tokens
    result = sampler.generate([bench.request([*prompt, *answer, 5, 6])])[0]
    assert result.cached_prompt_tokens == 40


def test_prefix_is_not_shared_between_adapters_or_versions(bench):
    sampler, prompt = bench.sampler(), bench.tokens(64)
    adapter, other = bench.adapter(seed=1, noise=0), bench.adapter(seed=1, noise=0)
    for owner, cached in ((None, 0), (adapter, 0), (other, 0), (adapter, 64), (None, 64)):
        assert sampler.generate([bench.request([*prompt, 1])], owner)[0].cached_prompt_tokens == cached
    snapshot = bench.pool.snapshot(adapter)
    bench.trainer.forward_backward(bench.items([adapter], [10]))
    bench.trainer.optim_step({adapter: AdamParams(learning_rate=0.05)})
    results = sampler.generate([bench.request([*prompt, 1])] * 2, [adapter, snapshot])
    assert [r.cached_prompt_tokens for r in results] == [0, 64]
    fresh = bench.sampler().generate([bench.request([*prompt, 1])], adapter)[0]
    assert tokens_of(results[0]) == tokens_of(fresh)


def test_prefix_is_not_shared_between_owners(bench):
    """How long a prompt takes would tell one owner what another has asked."""
    sampler, request = bench.sampler(), bench.request(bench.tokens(64))
    for owner, cached in (("alice", 0), ("bob", 0), ("alice", 48), ("bob", 48)):
        (result,) = sampler.generate([msgspec.structs.replace(request, cache_salt=owner)])
        assert result.cached_prompt_tokens == cached


def test_request_for_prompt_logprobs_computes_its_prompt_again(bench):
    sampler, prompt = bench.sampler(), bench.tokens(64)
    sampler.generate([bench.request(prompt)])
    result = sampler.generate([bench.request(prompt, prompt_logprobs=True)])[0]
    assert result.cached_prompt_tokens == 0
    assert len(result.prompt_logprobs or []) == 64


def test_training_the_adapter_does_not_change_a_request_in_flight(bench):
    adapter, prompt = bench.adapter(noise=0.05), bench.tokens(30)
    wish = bench.request(prompt, n=3, max_tokens=12)
    calm = bench.sampler().generate([wish], adapter)[0]
    sampler = bench.sampler(prefill_tokens=12)
    number = sampler.submit(wish, adapter)
    done = {}
    while sampler.has_work:
        bench.trainer.forward_backward(bench.items([adapter], [10]))
        bench.trainer.optim_step({adapter: AdamParams(learning_rate=0.05)})
        done.update((f.request_id, f.result) for f in sampler.step().finished)
    assert tokens_of(done[number]) == tokens_of(calm)
    trained = bench.sampler().generate([wish], adapter)[0]
    assert tokens_of(trained) != tokens_of(calm)


def test_requests_before_and_after_an_update_each_keep_their_weights(bench):
    adapter = bench.adapter(noise=0.05)
    wishes = [bench.request(bench.tokens(20), seed=i, max_tokens=10) for i in range(2)]
    old = [tokens_of(r) for r in bench.sampler().generate(wishes, adapter)]
    sampler = bench.sampler(max_rows=2)
    numbers = [sampler.submit(w, adapter) for w in wishes]
    sampler.step()
    bench.trainer.forward_backward(bench.items([adapter], [10]))
    bench.trainer.optim_step({adapter: AdamParams(learning_rate=0.05)})
    new = [tokens_of(r) for r in bench.sampler().generate(wishes, adapter)]
    numbers += [sampler.submit(w, adapter) for w in wishes]
    bench.pool.free(adapter)
    done = bench.run_to_end(sampler)
    assert [tokens_of(done[n]) for n in numbers] == old + new
    assert old != new
    bench.check_nothing_left(sampler, adapters=True)


def test_many_samples_are_drawn_a_few_at_a_time(bench, monkeypatch):
    wishes = [bench.request(bench.tokens(9), n=n, max_tokens=4, topk_logprobs=k) for n, k in ((7, 2), (1, 0), (4, 3))]
    whole = bench.sampler().generate(wishes)
    monkeypatch.setattr(head, "CHUNK_CELLS", {"cpu": 1})
    monkeypatch.setattr(head, "MIN_CHUNK_ROWS", 3)
    assert bench.sampler().generate(wishes) == whole


def test_adapter_may_be_freed_while_its_request_is_in_flight(bench):
    adapter, wish = bench.adapter(), bench.request(bench.tokens(30), max_tokens=15)
    calm = bench.sampler().generate([wish], adapter)[0]
    sampler = bench.sampler()
    number = sampler.submit(wish, adapter)
    sampler.step()
    bench.pool.free(adapter)
    newcomer = bench.adapter(seed=9)
    assert tokens_of(bench.run_to_end(sampler)[number]) == tokens_of(calm)
    bench.pool.free(newcomer)
    bench.check_nothing_left(sampler, adapters=True)


def test_tenant_with_ruined_weights_does_not_disturb_those_after_it(get_bench):
    """NaN in its keys and values: its pages go to others, who must never notice."""
    bench = get_bench()
    ruined, good = bench.adapter(seed=1), bench.adapter(seed=2)
    wishes = [bench.request(bench.tokens(n), n=2, max_tokens=10) for n in (5, 19, 40)]
    owners = [None, good, None]
    expected = bench.sampler().generate(wishes, owners)
    bench.trainer.forward_backward(bench.items([ruined], [10]))
    bench.trainer.optim_step({ruined: AdamParams(learning_rate=1e38)})
    sampler = bench.sampler(page_size=8, cache_tokens=320)
    for _ in range(2):
        sampler.generate([bench.request(bench.tokens(n), n=2, max_tokens=20) for n in (100, 60)], ruined)
        for a, b in zip(expected, sampler.generate(wishes, owners), strict=True):
            assert tokens_of(a) == tokens_of(b)
            assert all(math.isfinite(x) for s in b.sequences for x in s.logprobs)
    together = sampler.generate([bench.request(bench.tokens(30), max_tokens=10), *wishes], [ruined, *owners])[1:]
    assert [tokens_of(r) for r in together] == [tokens_of(r) for r in expected]


def test_what_was_in_memory_before_does_not_matter(bench):
    wishes = [bench.request(bench.tokens(n), n=2) for n in (3, 20, 33)]
    expected = bench.sampler().generate(wishes)
    per_token = 2 * bench.model.spec.n_layers * bench.model.spec.kv_size
    for cache_tokens in (64, 96, 128):
        dirty = [torch.full((cache_tokens * per_token,), math.nan) for _ in range(8)]
        del dirty  # the next allocation of this size gets one of these
        sampler = bench.sampler(cache_tokens=cache_tokens)
        assert [tokens_of(r) for r in sampler.generate(wishes)] == [tokens_of(r) for r in expected]
