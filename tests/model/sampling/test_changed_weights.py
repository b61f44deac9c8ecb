"""Requests that go on with other weights: each token is of the weights that drew it, and says which these were."""

from __future__ import annotations

import numpy as np
import pytest

from palestra.types.sampling import WeightsChange

EQUAL = 3e-5  # float32, summed in another order
MODELS = {"qwen3": {"family": "qwen3"}, "qwen3_5": {"family": "qwen3_5"}, "qwen3_moe": {"family": "qwen3_moe"}}
AHEAD = pytest.mark.parametrize("runs_ahead", [False, True], ids=["in-step", "ahead"])


def steps(sampler, n: int) -> None:
    for _ in range(n):
        sampler.step()


def spans(changes: list[WeightsChange], length: int) -> list[tuple[int, int, str]]:
    starts = [change.start for change in changes]
    return [(one.start, end, one.weights) for one, end in zip(changes, [*starts[1:], length], strict=True)]


@pytest.mark.parametrize("model", MODELS)
@AHEAD
def test_each_segment_has_the_logprobs_of_its_own_weights(get_bench, model, runs_ahead):
    bench = get_bench(**MODELS[model])
    weights = {name: bench.adapter(seed=seed, noise=0.05) for seed, name in enumerate("abc")}
    prompt, sampler = bench.tokens(40), bench.sampler(prefill_tokens=16, runs_ahead=runs_ahead)
    number = sampler.submit(bench.request(prompt, n=3, max_tokens=30), weights["a"])
    for name in "bc":
        steps(sampler, 11)
        assert sampler.change_weights(number, weights[name], name, keeps_keys=False)
    result = bench.run_to_end(sampler)[number]
    for sequence in result.sequences:
        found = spans([WeightsChange(0, "a"), *sequence.changes], 30)
        assert [name for *_, name in found] == ["a", "b", "c"]
        assert all(change.is_exact for change in sequence.changes)
        for start, end, name in found:
            truth = bench.logprobs(weights[name], prompt + sequence.tokens)[len(prompt) - 1 :]
            assert end > start
            assert np.abs(truth[start:end] - sequence.logprobs[start:end]).max() < EQUAL
    bench.check_nothing_left(sampler)


def test_kept_keys_are_not_exact_and_are_found_by_nobody(bench):
    old, new = bench.adapter(seed=0), bench.adapter(seed=1)
    prompt, sampler = bench.tokens(40), bench.sampler()
    number = sampler.submit(bench.request(prompt, max_tokens=60), old)
    steps(sampler, 20)
    sampler.change_weights(number, new, "new", keeps_keys=True)
    before = sampler.scheduler.preemptions
    (sequence,) = bench.run_to_end(sampler)[number].sequences
    (change,) = sequence.changes
    assert (change.weights, change.is_exact) == ("new", False)
    assert sampler.scheduler.preemptions == before
    truth = bench.logprobs(new, prompt + sequence.tokens)[len(prompt) - 1 :]
    assert np.abs(truth - sequence.logprobs)[change.start :].max() > EQUAL
    for adapter in (old, new):
        again = bench.request(prompt + sequence.tokens, max_tokens=8)
        (fresh,) = bench.sampler().generate([again], adapter)[0].sequences
        (cached,) = sampler.generate([again], adapter)[0].sequences
        assert cached.tokens == fresh.tokens
        assert np.abs(np.subtract(cached.logprobs, fresh.logprobs)).max() < EQUAL
    bench.check_nothing_left(sampler)


def test_a_request_that_has_not_begun_is_of_the_new_weights_alone(bench):
    old, new = bench.adapter(seed=0), bench.adapter(seed=1)
    wish = bench.request(bench.tokens(20), n=2, max_tokens=9)
    expected = bench.sampler().generate([wish], new)[0]
    sampler = bench.sampler()
    number = sampler.submit(wish, old)
    sampler.change_weights(number, new, "new", keeps_keys=True)
    result = bench.run_to_end(sampler)[number]
    assert [s.tokens for s in result.sequences] == [s.tokens for s in expected.sequences]
    assert [s.changes for s in result.sequences] == [[WeightsChange(0, "new")]] * 2


@AHEAD
def test_equal_weights_of_another_name_change_nothing_else(bench, runs_ahead):
    adapter = bench.adapter()
    twin, wish = bench.pool.snapshot(adapter), bench.request(bench.tokens(20), max_tokens=20)
    (expected,) = bench.sampler().generate([wish], adapter)[0].sequences
    sampler = bench.sampler(runs_ahead=runs_ahead)
    number = sampler.submit(wish, adapter)
    steps(sampler, 5)
    sampler.change_weights(number, twin, "twin", keeps_keys=False)
    (sequence,) = bench.run_to_end(sampler)[number].sequences
    assert (sequence.tokens, sequence.logprobs) == (expected.tokens, expected.logprobs)
    assert [change.weights for change in sequence.changes] == ["twin"]


def test_what_asks_for_prompt_logprobs_keeps_its_weights(bench):
    old, new = bench.adapter(seed=0), bench.adapter(seed=1)
    sampler = bench.sampler()
    scoring = sampler.submit(bench.request(bench.tokens(20), max_tokens=3, prompt_logprobs=True), old)
    base = sampler.submit(bench.request(bench.tokens(20), max_tokens=3))
    assert not sampler.change_weights(scoring, new, "new", keeps_keys=False)
    assert not sampler.change_weights(base, new, "new", keeps_keys=False)
    assert not sampler.change_weights(99, new, "new", keeps_keys=False)
    assert not any(s.changes for result in bench.run_to_end(sampler).values() for s in result.sequences)


def test_an_aborted_request_gives_back_the_weights_that_it_was_to_get(bench):
    old, new = bench.adapter(seed=0), bench.adapter(seed=1)
    sampler = bench.sampler()
    number = sampler.submit(bench.request(bench.tokens(20), max_tokens=50), old)
    sampler.step()
    sampler.change_weights(number, new, "new", keeps_keys=False)
    sampler.abort(number)
    assert not sampler.weights_in_use
    for adapter in (old, new):
        bench.pool.free(adapter)
    bench.check_nothing_left(sampler, adapters=True)
