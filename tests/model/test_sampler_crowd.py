"""A seeded request gets its own tokens, whoever shares the batch, the cache and the adapters with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from palestra.model.draw_noise import log_exponentials, noise_keys
from palestra.model.sampling import token_draws
from palestra.types import SampleResult
from tests.model.conftest import GEMMA4
from tests.properties import examples

MODELS = {
    "qwen3": {},
    "mistral": {"family": "mistral", "overrides": {"sliding_window": 9}},
    "qwen3_5": {"family": "qwen3_5"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "gpt_oss": {"family": "gpt_oss", "overrides": {"sliding_window": 9}},
}
MORE = {
    "nemotron_h": {"family": "nemotron_h"},
    "gemma4": {"family": "gemma4", "tie": True, "overrides": GEMMA4},
    "gemma4_moe": {"family": "gemma4_moe", "tie": True, "overrides": {"sliding_window": 9}},
    "olmo3": {"family": "olmo3", "overrides": {"sliding_window": 9}},
    "smollm3": {"family": "smollm3"},
    "ministral3": {"family": "ministral3", "context": 1024},
}


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [s.tokens for s in result.sequences]


def crowd_of(bench, n: int = 12):
    lengths = bench.rng.integers(1, 60, n)
    return [
        bench.request(
            bench.tokens(int(length)), n=1 + i % 3, seed=100 + i, temperature=(0.0, 0.8, 1.3)[i % 3], top_p=0.9
        )
        for i, length in enumerate(lengths)
    ]


def test_draws_that_rounding_could_move_have_the_same_bits_in_any_crowd(bench, monkeypatch):
    """Here all of them: what decides such a draw is computed without the crowd."""
    monkeypatch.setattr(token_draws, "ROUNDING", 1e9)
    adapter, mine = bench.adapter(), bench.request(bench.tokens(30), n=2, seed=5)
    (alone,) = bench.sampler().generate([mine], adapter)
    among = bench.sampler().generate([*crowd_of(bench), mine], adapter)[-1]
    assert [(s.tokens, s.logprobs) for s in among.sequences] == [(s.tokens, s.logprobs) for s in alone.sequences]


def test_seeded_request_gives_the_same_tokens_alone_and_in_a_crowd(bench):
    mine = bench.request(bench.tokens(30), n=4, seed=5, max_tokens=30)
    alone = bench.sampler().generate([mine])[0]
    crowd = crowd_of(bench)
    among = bench.sampler().generate([*crowd[:5], mine, *crowd[5:]])[5]
    assert tokens_of(among) == tokens_of(alone)
    for a, b in zip(alone.sequences, among.sequences, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert len({tuple(t) for t in tokens_of(alone)}) == 4, "samples differ from each other"


def test_seeded_request_gives_the_same_tokens_when_it_joins_late(bench):
    mine = bench.request(bench.tokens(30), n=2, seed=5, max_tokens=30)
    alone = bench.sampler().generate([mine])[0]
    sampler = bench.sampler(prefill_tokens=20)
    for other in crowd_of(bench):
        sampler.submit(other)
    for _ in range(4):
        sampler.step()
    number = sampler.submit(mine)
    assert tokens_of(bench.run_to_end(sampler)[number]) == tokens_of(alone)


def test_seeded_request_gives_the_same_tokens_after_preemption(bench):
    mine = [bench.request(bench.tokens(n), n=2, seed=n, max_tokens=30) for n in (20, 33, 8, 25)]
    alone = [bench.sampler().generate([r])[0] for r in mine]
    sampler = bench.sampler(page_size=4, cache_tokens=96, prefill_tokens=16)
    crowded = sampler.generate(mine)
    assert sampler.scheduler.preemptions > 0
    assert [tokens_of(r) for r in crowded] == [tokens_of(r) for r in alone]
    for a, b in zip(alone, crowded, strict=True):
        for one, other in zip(a.sequences, b.sequences, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    bench.check_nothing_left(sampler)


def test_preempted_request_still_gets_its_prompt_logprobs_once(bench):
    wishes = [bench.request(bench.tokens(30), n=2, seed=n, max_tokens=20, prompt_logprobs=True) for n in range(4)]
    sampler = bench.sampler(page_size=4, cache_tokens=96, prefill_tokens=11)
    results = sampler.generate(wishes)
    assert sampler.scheduler.preemptions > 0
    for wish, result in zip(wishes, results, strict=True):
        truth = bench.logprobs(None, list(wish.prompt))
        assert result.prompt_logprobs is not None
        assert np.abs(truth - result.prompt_logprobs[1:]).max() < 1e-5


def test_seeded_request_gives_the_same_tokens_with_adapters_mixed(bench):
    adapters = [bench.adapter(seed=i, rank=(4, 4, 9, 4)[i]) for i in range(4)]
    bench.pool.free(adapters.pop(1))
    owners = [None, *adapters]
    prompt = bench.tokens(40)
    wishes = [bench.request(prompt, n=2, seed=9, max_tokens=20) for _ in range(8)]
    mixed = bench.sampler().generate(wishes, [owners[i % 4] for i in range(8)])
    alone = [bench.sampler().generate([wishes[0]], [owner])[0] for owner in owners]
    for i, result in enumerate(mixed):
        assert tokens_of(result) == tokens_of(alone[i % 4])
    assert len({str(tokens_of(r)) for r in alone}) == 4


def test_requests_without_a_seed_differ(bench):
    a, b = bench.sampler().generate([bench.request(bench.tokens(5), max_tokens=20, seed=None)] * 2)
    assert tokens_of(a) != tokens_of(b)


def test_sample_of_a_group_is_the_same_whatever_the_groups_size(bench):
    prompt = bench.tokens(20)
    few, many = bench.sampler().generate([bench.request(prompt, n=2), bench.request(prompt, n=5)])
    assert tokens_of(many)[:2] == tokens_of(few)


# Anything at once


@dataclass(frozen=True)
class Wish:
    prefix: int
    tail: int
    n: int
    new: int
    owner: int
    seed: int
    kind: str
    at_step: int
    abort_at: int | None


WISHES = st.builds(
    Wish,
    prefix=st.sampled_from([0, 0, 9, 23]),
    tail=st.integers(1, 14),
    n=st.sampled_from([1, 1, 2, 4]),
    new=st.integers(1, 12),
    owner=st.integers(0, 3),
    seed=st.integers(0, 3),
    kind=st.sampled_from(["plain", "plain", "greedy", "filtered", "prompt"]),
    at_step=st.integers(0, 10),
    abort_at=st.one_of(st.none(), st.none(), st.integers(0, 20)),
)
KINDS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 0.8, "top_k": 30, "top_p": 0.9},
    "prompt": {"prompt_logprobs": True},
}


MIXES = {
    "wishes": st.lists(WISHES, min_size=2, max_size=7),
    "page_size": st.sampled_from([1, 4, 16]),
    "spare": st.integers(0, 60),
    "max_rows": st.sampled_from([2, 5, 256]),
    "prefill_tokens": st.sampled_from([3, 16, 2048]),
    "runs_ahead": st.booleans(),
}


# The same examples every time: another rounding at the very edge of a draw would be another token.
@pytest.mark.parametrize("model", ["qwen3", "qwen3_5", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("small_chunks")
@examples(15, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**MIXES)
def test_any_mix_of_requests_gives_each_what_it_gets_alone(get_bench, model, **mix):
    check_mix(get_bench(**MODELS[model]), **mix)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS | MORE)
@pytest.mark.usefixtures("small_chunks")
@examples(400, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**MIXES)
def test_many_mixes_of_requests_give_each_what_it_gets_alone(get_bench, model, **mix):
    check_mix(get_bench(**(MODELS | MORE)[model]), **mix)


def is_cut_at_an_edge(bench, owner, request, sample, one, other) -> bool:
    """Whether two runs part where the two best tokens are within rounding of each other: there, and only there, a
    last-bit difference is another token (docs/design/determinism-and-recovery.md)."""
    parted = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if parted is None or request.params.temperature != 1.0:
        return False
    prompt = list(request.prompt)
    (logp,) = bench.distributions([prompt + one[:parted]], [owner])
    keys = torch.from_numpy(noise_keys([(request.params.seed, sample, parted)]))
    first, second = (torch.from_numpy(logp[-1:]) - log_exponentials(keys, logp.shape[1])).topk(2).values[0].tolist()
    return first - second < 2e-5


def check_mix(bench, wishes, page_size, spare, max_rows, prefill_tokens, runs_ahead):
    owners = [None, bench.adapter(seed=1), bench.adapter(seed=7), bench.adapter(seed=2), bench.adapter(seed=3, rank=9)]
    bench.pool.free(owners.pop(2))  # a gap between the slots
    prefix = bench.tokens(23)
    request = [
        bench.request(prefix[: w.prefix] + bench.tokens(w.tail), n=w.n, seed=w.seed, max_tokens=w.new, **KINDS[w.kind])
        for w in wishes
    ]
    alone = [bench.sampler().generate([r], [owners[w.owner]])[0] for r, w in zip(request, wishes, strict=True)]
    longest = max(len(r.prompt) + w.new for r, w in zip(request, wishes, strict=True))
    sampler = bench.sampler(
        page_size=page_size,
        cache_tokens=-(-longest // page_size) * page_size + spare,
        max_rows=max_rows,
        prefill_tokens=prefill_tokens,
        runs_ahead=runs_ahead,
    )
    numbers: dict[int, int] = {}
    done: dict[int, SampleResult] = {}
    aborted: dict[int, SampleResult] = {}
    for step in range(1000):
        for i, wish in enumerate(wishes):
            if wish.at_step == step:
                numbers[i] = sampler.submit(request[i], owners[wish.owner])
            if wish.abort_at == step and i in numbers:
                result = sampler.abort(numbers[i])
                if result is not None:
                    aborted[numbers[i]] = result
        if step > 10 and not sampler.has_work:
            break
        done.update((f.request_id, f.result) for f in sampler.step().finished)

    for i, (wish, truth) in enumerate(zip(wishes, alone, strict=True)):
        number = numbers[i]
        assert (number in done) != (number in aborted)
        result = done.get(number) or aborted[number]
        for k, (one, other) in enumerate(zip(truth.sequences, result.sequences, strict=True)):
            if is_cut_at_an_edge(bench, owners[wish.owner], request[i], k, one.tokens, other.tokens):
                continue
            if number in done:
                assert other.tokens == one.tokens
                assert other.stop_reason == one.stop_reason
            assert other.tokens == one.tokens[: len(other.tokens)]
            assert other.logprobs == pytest.approx(one.logprobs[: len(other.logprobs)], abs=1e-4)
        if wish.kind == "prompt" and number in done:
            assert result.prompt_logprobs is not None
            assert truth.prompt_logprobs is not None
            assert result.prompt_logprobs[1:] == pytest.approx(truth.prompt_logprobs[1:], abs=1e-4)
    for owner in owners[1:]:
        assert owner is not None
        bench.pool.free(owner)
    bench.check_nothing_left(sampler, adapters=True)
