"""Forward and backward: the same numbers however the work is cut into pieces."""

from __future__ import annotations

import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.model import Decoder, Trainer, TrainItem, encode
from palestra.model.lora import linear
from palestra.model.mlp import dense
from palestra.model.training import activation_offload
from palestra.model.training.prepared import decode
from palestra.types import AdamParams, Datum, SampleRequest, SamplingParams
from tests.model.conftest import GEMMA4
from tests.properties import examples

LENGTHS = [30, 4, 17, 1, 52, 30, 9, 24, 41]


def for_adapter(adapter, items):
    return [TrainItem(adapter, i.datum, i.loss, i.config) for i in items]


def check_close(ours, truth, tolerance=1e-5):
    whole = torch.cat([g.flatten() for g in truth.values()]).norm()
    assert whole > 0
    for name, gradient in ours.items():
        assert (gradient - truth[name]).norm() <= tolerance * truth[name].norm() + 0.1 * tolerance * whole, name


def trained(bench):
    """Results of a request of two adapters, and the gradients of both."""
    adapters = [bench.adapter(seed=1), bench.adapter(seed=2)]
    results = bench.trainer.forward_backward(bench.items(adapters, LENGTHS))
    return results, [bench.gradient(adapter) for adapter in adapters]


def check_equal(ours, truth):
    assert ours.keys() == truth.keys()
    assert all(torch.equal(ours[n], truth[n]) for n in ours)


def flat(matrices) -> torch.Tensor:
    return torch.cat([m.flatten() for m in matrices.values()])


# Micro-batches


@pytest.mark.parametrize("budget", [1, 30, 64, 100])
def test_token_budget_does_not_change_losses_and_gradients(get_bench, budget):
    ends = []
    for token_budget in (10_000, budget):
        bench = get_bench(token_budget=token_budget)
        adapters = [bench.adapter(seed=1), bench.adapter(seed=2, rank=7)]
        results = bench.trainer.forward_backward(bench.items(adapters, LENGTHS))
        ends.append((results, [bench.gradient(a) for a in adapters]))
    for a, b in zip(ends[0][0], ends[1][0], strict=True):
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-5
        assert a.loss == pytest.approx(b.loss, rel=1e-5, abs=1e-5)
    for a, b in zip(ends[0][1], ends[1][1], strict=True):
        check_close(b, a)


def test_micro_batches_keep_to_the_budget_and_lose_nothing(get_bench):
    bench = get_bench(token_budget=60)
    items = bench.items([bench.adapter(), bench.adapter(seed=1)], [*LENGTHS, 90, 1, 2])
    plan = bench.trainer.plan(bench.trainer.prepare(items, train=True))
    assert sorted(n for batch in plan for n in batch.numbers) == list(range(len(items)))
    sizes = [[len(items[n].datum.chunks[0].tokens) for n in batch.numbers] for batch in plan]
    assert all(sum(batch) <= 60 or len(batch) == 1 for batch in sizes)
    assert len(plan) < len(items)


class CountingDecoder(Decoder):
    computed = 0

    def __call__(self, tokens, *args, **kwargs):
        self.computed += len(tokens)
        return super().__call__(tokens, *args, **kwargs)


def test_packed_batch_computes_its_tokens_and_no_padding(bench):
    decoder = CountingDecoder(bench.model.spec, bench.model.decoder.weights)
    trainer = Trainer(decoder, bench.pool, token_budget=100)
    items = bench.items([bench.adapter(), bench.adapter(seed=1)], LENGTHS)
    trainer.forward_backward(items)
    assert decoder.computed == sum(LENGTHS)


@examples(50)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12), budget=st.integers(1, 200))
def test_plan_of_a_lone_tenant_depends_only_on_its_data(get_bench, lengths, budget):
    plans = []
    for earlier in (0, 3):
        bench = get_bench(token_budget=budget)
        for i in range(earlier):  # other tenants, other slots, other ids, other work done before
            bench.adapter(seed=i, noise=0)
        adapter = bench.adapter(noise=0)
        items = bench.items([adapter], lengths)
        plans.append(bench.trainer.plan(bench.trainer.prepare(items, train=True)))
    assert plans[0] == plans[1]


# Forward and backward


def partly_off(bench, adapter):
    """Data as in training on answers: no weight on the prompt, some data without any, one without zeros."""
    items = []
    for i, n in enumerate([40, 7, 33, 21, 64, 5]):
        weights = bench.rng.normal(size=n)
        weights[: (n * i) // 5] = 0.0
        items.append(TrainItem(adapter, bench.datum(n, weights=weights)))
    return items


def losses_of_every_kind(bench, adapter):
    items = []
    for i, name in enumerate(["ppo", "gspo", "cross_entropy", "cispo", "dro", "importance_sampling", "gspo"]):
        n = 10 + 5 * i
        gate = bench.rng.normal(size=n)
        gate[: 2 * i] = 0.0
        x = {"weights": gate} if name == "cross_entropy" else {"advantages": gate, "logprobs": np.full(n, -6.0)}
        items.append(TrainItem(adapter, bench.datum(n, **x), name))
    return items


@pytest.mark.parametrize("make", [partly_off, losses_of_every_kind])
@pytest.mark.parametrize("budget", [50, 2048])
@pytest.mark.parametrize("vocab", [512, 20_000])
def test_forward_equals_forward_backward_bit_for_bit(get_bench, make, budget, vocab):
    bench = get_bench(token_budget=budget, vocab_size=vocab)
    items = make(bench, bench.adapter())
    for a, b in zip(bench.trainer.forward(items), bench.trainer.forward_backward(items), strict=True):
        assert np.array_equal(a.logprobs, b.logprobs)
        assert a.loss == b.loss
        assert a.metrics == b.metrics


@pytest.mark.parametrize(("budget", "vocab"), [(50, 20_000), (2048, 512)])
def test_losses_of_samples_report_the_entropy_where_they_learn(get_bench, budget, vocab):
    bench = get_bench(token_budget=budget, vocab_size=vocab)
    items = losses_of_every_kind(bench, bench.adapter())
    assert [one.entropies for one in bench.trainer.forward(items)] == [None] * len(items)
    for item, result in zip(items, bench.trainer.forward_backward(items), strict=True):
        if item.loss == "cross_entropy":
            assert result.entropies is None
            continue
        assert result.entropies is not None
        is_learned = decode(item.datum.loss_inputs["advantages"], "advantages") != 0
        assert np.array_equal(np.isnan(result.entropies), ~is_learned)
        (logp,) = bench.distributions([item.datum.chunks[0].tokens], [item.adapter])
        assert result.entropies[is_learned] == pytest.approx(-(np.exp(logp) * logp).sum(1)[is_learned], abs=1e-4)


@pytest.mark.parametrize("active", [0, 1, 2, 3, 19, 20])
def test_logprobs_do_not_depend_on_the_weights_to_the_bit(bench, active):
    """A client-side loss is two passes: forward without weights, then forward_backward with those it worked out."""
    adapter, draft = bench.adapter(), bench.datum(20)
    weights = np.zeros(20)
    weights[bench.rng.permutation(20)[:active]] = bench.rng.normal(size=active)
    passes = []
    for w in (np.zeros(20), weights):
        inputs = {**draft.loss_inputs, "weights": encode(w)}
        passes.append([TrainItem(adapter, Datum(chunks=draft.chunks, loss_inputs=inputs))])
    first = bench.trainer.forward(passes[0])[0].logprobs
    assert np.array_equal(first, bench.trainer.forward(passes[1])[0].logprobs)
    assert np.array_equal(first, bench.trainer.forward_backward(passes[1])[0].logprobs)


def test_forward_never_touches_gradients(bench):
    adapter = bench.adapter()
    items = bench.items([adapter], LENGTHS)
    bench.trainer.forward(items)
    assert not adapter.has_gradient
    bench.trainer.forward_backward(items)
    before = bench.gradient(adapter)
    bench.trainer.forward(items)
    check_equal(bench.gradient(adapter), before)


@pytest.fixture
def _fresh_memory_is_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what nothing has written
    yield
    torch.use_deterministic_algorithms(False)


SAME_GRADIENTS = ["qwen3", "llama", "mistral", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "nemotron_h", "gemma4"]


@pytest.mark.usefixtures("_fresh_memory_is_nan")
@pytest.mark.parametrize("family", SAME_GRADIENTS)
def test_activation_checkpointing_gives_the_same_gradients(get_bench, family):
    options = {"overrides": GEMMA4} if family == "gemma4" else {}
    ends = [trained(get_bench(family, checkpointing=checkpointing, **options)) for checkpointing in (False, True)]
    for a, b in zip(*(r for r, _ in ends), strict=True):
        assert np.array_equal(a.logprobs, b.logprobs)
    for a, b in zip(*(g for _, g in ends), strict=True):
        check_close(b, a, 1e-6)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "nemotron_h", "qwen3_moe"])
def test_offloaded_activations_give_the_same_bits(get_bench, monkeypatch, family):
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 0)
    (results, gradients), (offloaded, theirs) = (
        trained(get_bench(family, checkpointing=checkpointing)) for checkpointing in (True, "offload")
    )
    for a, b in zip(results, offloaded, strict=True):
        assert np.array_equal(a.logprobs, b.logprobs)
    for a, b in zip(gradients, theirs, strict=True):
        check_equal(b, a)


def test_an_offloaded_pass_that_breaks_off_leaves_nothing_behind(get_bench, monkeypatch):
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 0)
    bench = get_bench(checkpointing="offload")
    adapter = bench.adapter()
    trainer = bench.trainer
    data = trainer.prepare(bench.items([adapter], LENGTHS), train=True)

    def gradient():
        trainer.backward(trainer.forward_micro(data, train=True))
        found = bench.gradient(adapter)
        bench.pool.discard_gradient(adapter)
        return found

    expected = gradient()
    broken = trainer.forward_micro(data, train=True)
    offload = weakref.ref(broken.offload)

    def fail(_):
        raise RuntimeError("no memory")

    node = broken.hidden.grad_fn
    while node.name() != "AddBackward0":  # joins what the last layer but one gives
        node = node.next_functions[0][0]
    node.register_prehook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        trainer.backward(broken)
    del node
    assert offload() is None
    bench.pool.discard_gradient(adapter)
    check_equal(gradient(), expected)


def test_layers_are_computed_again_without_their_last_product(get_bench, monkeypatch):
    bench, multiplied = get_bench(checkpointing=True), Counter()
    plain = linear.frozen_linear

    def counted(x, weight, bias):
        multiplied[id(weight)] += 1
        return plain(x, weight, bias)

    monkeypatch.setattr(linear, "frozen_linear", counted)
    trained(bench)
    mlps = [layer.mlp for layer in bench.model.decoder.weights.layers]
    passes = {multiplied[id(mlp.down)] for mlp in mlps}
    assert passes == {multiplied[id(mlps[0].gate_up)] // 2}


@pytest.mark.usefixtures("_fresh_memory_is_nan")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_feed_forward_networks_of_long_batches_are_computed_in_parts(get_bench, monkeypatch, checkpointing):
    results, gradients = trained(get_bench(checkpointing=checkpointing))
    monkeypatch.setattr(dense, "LONG_ROWS", 7)
    in_parts, theirs = trained(get_bench(checkpointing=checkpointing))
    for a, b in zip(results, in_parts, strict=True):
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-5)
    for a, b in zip(gradients, theirs, strict=True):
        check_close(b, a)


def test_forward_and_backward_are_separate_steps(get_bench):
    whole, stepwise = get_bench(token_budget=64), get_bench(token_budget=64)
    one, other = whole.adapter(), stepwise.adapter()
    items = whole.items([one], LENGTHS)
    results = whole.trainer.forward_backward(items)

    trainer = stepwise.trainer
    data = trainer.prepare(for_adapter(other, items), train=True)
    found = {}
    for batch in trainer.plan(data):
        done = trainer.forward_micro([data[i] for i in batch.numbers], train=True)
        found.update(zip(batch.numbers, done.results, strict=True))
        assert other.unfinished
        trainer.backward(done)
        assert not other.unfinished
    check_equal(stepwise.gradient(other), whole.gradient(one))
    for i, result in enumerate(results):
        assert np.array_equal(found[i].logprobs, result.logprobs)


def test_sampling_between_forward_and_backward_disturbs_neither(get_bench):
    """What an engine that trains and samples at once relies on."""
    calm, busy = get_bench(), get_bench()
    one, other = calm.adapter(), busy.adapter()
    items = calm.items([one], LENGTHS)
    calm.trainer.forward_backward(items)
    sampler = busy.sampler()
    request = SampleRequest(prompt=(5, 6, 7), params=SamplingParams(max_tokens=6, seed=2))
    expected = calm.sampler().generate([request], [one])[0]
    data = busy.trainer.prepare(for_adapter(other, items), train=True)
    done = busy.trainer.forward_micro(data, train=True)
    assert sampler.generate([request], [other])[0].sequences[0].tokens == expected.sequences[0].tokens
    busy.trainer.backward(done)
    check_close(busy.gradient(other), calm.gradient(one))


def test_gradients_accumulate_over_calls(get_bench):
    once, often = get_bench(), get_bench()
    one, other = once.adapter(), often.adapter()
    items = once.items([one], LENGTHS)
    once.trainer.forward_backward(items)
    for item in for_adapter(other, items):
        often.trainer.forward_backward([item])
        often.trainer.forward([item])
    check_close(often.gradient(other), once.gradient(one))


def test_step_applies_and_clears_the_gradient(bench):
    adapter = bench.adapter()
    bench.trainer.forward_backward(bench.items([adapter], [20]))
    norm = flat(bench.gradient(adapter)).norm().item()
    result = bench.trainer.optim_step({adapter: AdamParams()})[adapter]
    assert result.error is None
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert not flat(bench.gradient(adapter)).any()
    assert not adapter.has_gradient


# It learns


def test_overfitting_one_sentence_brings_the_loss_near_zero(bench):
    tokens = bench.model.tokenizer.encode("The quick brown fox jumps over the lazy dog.").ids
    adapter = bench.adapter(rank=8, noise=0)
    datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))
    first = bench.trainer.forward([TrainItem(adapter, datum)])[0].loss
    for _ in range(60):
        bench.trainer.forward_backward([TrainItem(adapter, datum)])
        bench.trainer.optim_step({adapter: AdamParams(learning_rate=0.01)})
    last = bench.trainer.forward([TrainItem(adapter, datum)])[0].loss
    assert first > 2 * len(tokens)
    assert last < 0.05
    request = SampleRequest(
        prompt=tuple(tokens[:1]), params=SamplingParams(temperature=0.0, max_tokens=len(tokens) - 1)
    )
    assert bench.sampler().generate([request], [adapter])[0].sequences[0].tokens == tokens[1:]
