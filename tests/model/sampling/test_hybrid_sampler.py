"""Sampling a model with recurrent states: shared prefixes, few slots, steps that fail, tenants that ruin theirs."""

from __future__ import annotations

import pytest

from palestra.model import Decoder
from palestra.model.sampling import sampler as sampler_module
from palestra.types import SampleResult


@pytest.fixture(params=["qwen3_5", "nemotron_h"])
def hybrid(get_bench, request):
    return get_bench(request.param)


one_every_day = pytest.mark.parametrize(
    "hybrid", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.slow)], indirect=True
)
"""For what is about slots, whatever the states in them are."""


def tokens_of(result: SampleResult) -> list[list[int]]:
    return [s.tokens for s in result.sequences]


def test_prefix_in_the_cache_gives_the_same_tokens_and_is_not_computed(hybrid):
    prompt = hybrid.tokens(150)
    request = hybrid.request(prompt, n=2, max_tokens=8, raw_logprobs=True)
    sampler = hybrid.sampler()
    first, second = (sampler.generate([request])[0] for _ in range(2))
    assert (first.cached_prompt_tokens, second.cached_prompt_tokens) == (0, 128)
    assert tokens_of(first) == tokens_of(second)
    longer = hybrid.request(prompt + first.sequences[0].tokens + hybrid.tokens(30), max_tokens=8)
    found, alone = sampler.generate([longer])[0], hybrid.sampler().generate([longer])[0]
    assert (found.cached_prompt_tokens, tokens_of(found)) == (128, tokens_of(alone))


@pytest.mark.parametrize("prefill_tokens", [1, 70, 128, 2048])
def test_how_a_prompt_is_cut_changes_nothing(hybrid, prefill_tokens):
    request = hybrid.request(hybrid.tokens(140), max_tokens=6, raw_logprobs=True)
    whole = hybrid.sampler().generate([request])[0].sequences[0]
    cut = hybrid.sampler(prefill_tokens=prefill_tokens).generate([request])[0].sequences[0]
    assert cut.tokens == whole.tokens
    assert cut.raw_logprobs == pytest.approx(whole.raw_logprobs, abs=2e-5)


def test_adapters_do_not_share_states(hybrid):
    prompt, adapters = hybrid.tokens(100), [None, hybrid.adapter(seed=1), hybrid.adapter(seed=2)]
    sampler = hybrid.sampler()
    requests = [hybrid.request(prompt, max_tokens=8)] * 3
    for _ in range(2):
        together = sampler.generate(requests, adapters)
        alone = [hybrid.sampler().generate([requests[0]], [a])[0] for a in adapters]
        assert [tokens_of(r) for r in together] == [tokens_of(r) for r in alone]
        hybrid.scramble(adapters[1], seed=3)  # its old snapshots must not be found


@one_every_day
def test_more_samples_than_slots_are_served_in_turns(hybrid, monkeypatch):
    request = hybrid.request(hybrid.tokens(70), n=5, max_tokens=12)
    plenty = hybrid.sampler().generate([request])[0]
    monkeypatch.setattr(sampler_module, "CPU_CACHE_BYTES", 6 * hybrid.model.spec.state_bytes(4))
    sampler = hybrid.sampler()
    assert sampler.state_slots.n_slots == 3
    assert tokens_of(sampler.generate([request])[0]) == tokens_of(plenty)
    hybrid.check_nothing_left(sampler)


@one_every_day
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_step_that_fails_advances_nobody_twice(hybrid, monkeypatch, steps, runs_ahead):
    """One is in the step that fails; the other waits for a slot, shares the prompt, and is served as if alone."""
    prompt = hybrid.tokens(140)
    mine = hybrid.request(prompt, max_tokens=6)
    alone = hybrid.sampler().generate([mine])[0]
    monkeypatch.setattr(sampler_module, "CPU_CACHE_BYTES", 2 * hybrid.model.spec.state_bytes(4))
    sampler = hybrid.sampler(prefill_tokens=64, runs_ahead=runs_ahead)
    assert sampler.state_slots.n_slots == 1
    broken, good = sampler.submit(hybrid.request(prompt, max_tokens=12)), sampler.submit(mine)
    for _ in range(steps):
        sampler.step()
    layer = Decoder._layer

    def fail(self, n, *args):
        if n == 1:
            raise RuntimeError("out of luck")
        return layer(self, n, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "_layer", fail)
        output = sampler.step()
    assert [f.request_id for f in output.failed] == [broken]
    assert tokens_of(hybrid.run_to_end(sampler)[good]) == tokens_of(alone)
    hybrid.check_nothing_left(sampler)


def test_ruined_tenant_leaves_nothing_in_its_slot(hybrid):
    ruined = hybrid.adapter()
    hybrid.pool.before_change(ruined)
    ruined.row("weights").fill_(float("nan"))
    hybrid.pool.after_change(ruined)
    request = hybrid.request(hybrid.tokens(70), max_tokens=8, raw_logprobs=True)
    alone = hybrid.sampler().generate([request])[0]
    sampler = hybrid.sampler(max_rows=1)
    sampler.submit(request, ruined)
    hybrid.run_to_end(sampler)
    assert tokens_of(sampler.generate([request])[0]) == tokens_of(alone)
