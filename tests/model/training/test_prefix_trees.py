"""What data share is computed once, and nobody can tell from the results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.model import AdapterPool, Trainer, TrainItem, encode, load_model
from palestra.model.training.losses import loss_named
from palestra.model.training.prefix_trees import BEYOND, MIN_SHARED, grow_trees, plan_micro_batches
from palestra.model.training.prepared import Prepared
from palestra.types import Datum, RoutedExperts
from tests.model.conftest import GEMMA4, Bench
from tests.model.test_training import CountingDecoder, check_close
from tests.properties import examples


def prepared(tokens, adapter=None) -> Prepared:
    tokens = np.array(tokens, np.int64)
    column = np.ones((len(tokens), 1), np.float32)
    return Prepared(adapter, tokens, tokens[:, None], {"weights": column}, loss_named("cross_entropy"), {}, wide=False)


# Trees


@st.composite
def families(draw):
    """Data that branch off earlier ones at any place, repeat them, or begin anew."""
    made = [draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))]
    for _ in range(draw(st.integers(0, 9))):
        kept = draw(st.sampled_from(made))[: draw(st.integers(0, 40))]
        made.append(kept + draw(st.lists(st.integers(0, 3), min_size=0 if kept else 1, max_size=30)))
    return made


@examples(200)
@given(families(), st.integers(1, 3))
def test_each_position_finds_its_token_and_all_before_it(made, adapters):
    owners = [object() for _ in range(adapters)]
    data = [prepared(tokens, owners[n % adapters]) for n, tokens in enumerate(made)]
    trees = grow_trees(data)
    tokens = trees.of_rows([one.tokens for one in data])
    assert len(tokens) == trees.rows == sum(trees.lengths)
    for one, path in zip(data, trees.paths, strict=True):
        assert (tokens[path] == one.tokens).all()
    branches = trees.branches()
    if branches is None:
        assert trees.rows == sum(map(len, made))
        return
    seen, start = np.zeros((trees.rows, trees.rows), bool), 0
    for n in trees.lengths:
        seen[start : start + n, start : start + n] = branches.seen(start, start + n, None)
        start += n
    truth = np.zeros_like(seen)
    for path in trees.paths:
        truth[np.ix_(path, path)] |= np.tri(len(path), dtype=bool)
    assert (seen == truth).all()
    for row, position, n, source in branches.spans:
        assert (branches.positions[row : row + n] == np.arange(position, position + n)).all()
        assert (branches.paths[source + position : source + position + n] == np.arange(row, row + n)).all()
    assert sum(n for _, _, n, _ in branches.spans) == trees.rows


def test_short_prefixes_and_those_of_other_adapters_are_not_shared():
    prompt = list(range(MIN_SHARED))
    ours, theirs = object(), object()
    assert grow_trees([prepared([*prompt, 1], ours), prepared([*prompt, 2], ours)]).rows == MIN_SHARED + 2
    assert grow_trees([prepared([*prompt, 1], ours), prepared([*prompt, 2], theirs)]).is_plain
    assert grow_trees([prepared([*prompt[1:], 1], ours), prepared([*prompt[1:], 2], ours)]).is_plain


@examples(100)
@given(families(), st.integers(1, 80))
def test_a_plan_has_everything_once_and_keeps_to_the_budget(made, budget):
    data = [prepared(tokens) for tokens in made]
    plan = plan_micro_batches(data, budget)
    assert sorted(n for batch in plan for n in batch.numbers) == list(range(len(data)))
    for batch in plan:
        longest = max(len(made[n]) for n in batch.numbers)
        assert batch.rows <= max(budget, longest + budget // BEYOND) or len(batch.numbers) == 1
        assert grow_trees([data[n] for n in batch.numbers]).rows <= batch.rows


def test_groups_stay_whole_where_the_budget_allows_it():
    prompts = [[n] * 40 for n in range(3)]
    data = [prepared(prompt + [10 + k] * 10) for k in range(4) for prompt in prompts]
    for budget, batches in ((1000, 1), (80, 3), (60, 6)):
        plan = plan_micro_batches(data, budget)
        assert [batch.rows for batch in plan] == [80 * 3 // batches if batches < 6 else 60] * batches, budget
        assert all(len({n % 3 for n in batch.numbers}) == 3 // min(batches, 3) for batch in plan)


def test_turns_of_a_conversation_that_is_longer_than_a_micro_batch_share_it():
    """Each turn goes on from the one before: all that there is to compute is the longest."""
    conversation = list(range(400))
    turns = [prepared(conversation[:n]) for n in (100, 200, 300, 400)]
    assert [batch.rows for batch in plan_micro_batches(turns, 128)] == [400]
    answers = [prepared(conversation + [1000 + n] * 30) for n in range(4)]
    assert [batch.rows for batch in plan_micro_batches(answers, 128)] == [460, 460]


# Results


def shared_items(bench, adapter, loss="cross_entropy", width=1):
    """Two prompts with answers that branch again, one without any, one that is a prompt alone, one twice."""
    rng = np.random.default_rng(3)

    def tokens(n):
        return rng.integers(0, bench.vocab, n).tolist()

    first, second = tokens(70), tokens(33)
    turn = first + tokens(20)
    sequences = [turn + tokens(9), turn + tokens(24), first + tokens(5), first[:40] + tokens(17), first]
    sequences += [second + tokens(12), second + tokens(30), tokens(25)]
    sequences.append(list(sequences[1]))
    items = []
    for n, sequence in enumerate(sequences):
        targets = np.array([*sequence[1:], int(rng.integers(bench.vocab))])
        if width > 1:
            targets = np.column_stack([targets, rng.integers(0, bench.vocab, (len(targets), width - 1))])
        shape = targets.shape
        weights = rng.normal(size=shape)
        weights[: len(weights) // 2 if n % 3 else 0] = 0.0
        names = {"cross_entropy": {"weights": weights}}.get(
            loss, {"advantages": weights, "logprobs": rng.normal(size=shape) * 0.3 - np.log(bench.vocab)}
        )
        arrays = {name: encode(array.astype(np.float32)) for name, array in names.items()}
        items.append(TrainItem(adapter, Datum.of_tokens(sequence, target_tokens=encode(targets), **arrays), loss))
    return items


RECURRENT = [pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_5", "nemotron_h")]
FAMILIES = ["qwen3", "gpt_oss", "gemma3", "deepseek_v3", "qwen3_moe", *RECURRENT]


def trained(get_bench, share, make=shared_items, **options):
    make_options = {name: options.pop(name) for name in ("loss", "width") if name in options}
    bench = get_bench(share_prefixes=share, **options)
    adapter = bench.adapter()
    items = make(bench, adapter, **make_options)
    results = bench.trainer.forward_backward(items)
    return results, bench.gradient(adapter)


def check_same(ours, truth):
    for a, b in zip(ours[0], truth[0], strict=True):
        assert a.logprobs.shape == b.logprobs.shape
        assert np.abs(a.logprobs - b.logprobs).max() < 2e-5
        assert a.loss == pytest.approx(b.loss, rel=1e-5, abs=2e-4)
        assert a.metrics.keys() == b.metrics.keys()
        assert (a.entropies is None) == (b.entropies is None)
        if a.entropies is not None and b.entropies is not None:
            np.testing.assert_allclose(a.entropies, b.entropies, atol=2e-5)
        if a.visits is not None and b.visits is not None:
            assert (a.visits == b.visits).all()
    check_close(ours[1], truth[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_gradients_are_those_of_each_datum_alone(get_bench, family):
    check_same(trained(get_bench, True, family=family), trained(get_bench, False, family=family))


def test_a_layer_that_reads_the_keys_of_another_sees_the_same_rows(get_bench):
    options = {"family": "gemma4", "overrides": GEMMA4}
    check_same(trained(get_bench, True, **options), trained(get_bench, False, **options))


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_every_loss_has_its_own_advantages_on_shared_tokens(get_bench, loss):
    ours = trained(get_bench, True, loss=loss)
    assert all(result.entropies is not None for result in ours[0])
    check_same(ours, trained(get_bench, False, loss=loss))


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_packed_weights_see_the_same_rows(random_model, weights):
    found = []
    for share in (True, False):
        model = load_model(random_model(), weights=weights)
        pool = AdapterPool(model.spec, dtype=model.decoder.dtype)
        bench = Bench(model, lambda: None, pool, Trainer(model.decoder, pool, share_prefixes=share))
        adapter = bench.adapter()
        found.append((bench.trainer.forward_backward(shared_items(bench, adapter)), bench.gradient(adapter)))
    check_same(*found)


@pytest.mark.parametrize("is_base", [False, True])
def test_a_forward_pass_returns_the_logprobs_of_every_position_of_each_datum(get_bench, is_base):
    """Log-probabilities of prompts, whose weights are 0, and those of the base model are returned too."""
    found = []
    for share in (True, False):
        bench = get_bench(share_prefixes=share)
        items = shared_items(bench, None if is_base else bench.adapter())
        found.append(bench.trainer.forward(items))
        plan = bench.trainer.plan(bench.trainer.prepare(items, train=False))
        assert (sum(batch.rows for batch in plan) < sum(len(one.logprobs) for one in found[-1])) == share
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-5)


def test_a_custom_loss_has_its_own_gradient_on_shared_tokens(get_bench):
    """As clients compute one: log-probabilities by `forward`, then the gradient of the loss as weights."""
    found = []
    for share in (True, False):
        bench = get_bench(share_prefixes=share)
        adapter = bench.adapter()
        items = shared_items(bench, adapter)
        sums = [torch.tensor(one.logprobs, requires_grad=True) for one in bench.trainer.forward(items)]
        pairs = [a.sum() - b.sum() for a, b in zip(sums[::2], sums[1::2], strict=False)]
        loss = -torch.nn.functional.logsigmoid(0.01 * torch.stack(pairs)).sum() + sums[-1].exp().sum()
        loss.backward()
        weighted = []
        for item, logprobs in zip(items, sums, strict=True):
            inputs = {**item.datum.loss_inputs, "weights": encode(-logprobs.grad.numpy())}
            weighted.append(TrainItem(adapter, Datum(chunks=item.datum.chunks, loss_inputs=inputs)))
        found.append((bench.trainer.forward_backward(weighted), bench.gradient(adapter)))
    check_same(*found)


def test_targets_of_several_tokens_may_differ_where_the_prefix_does_not(get_bench):
    check_same(trained(get_bench, True, width=3), trained(get_bench, False, width=3))


@pytest.mark.parametrize("options", [{"token_budget": 60}, {"checkpointing": True}])
def test_micro_batches_and_recomputing_change_nothing(get_bench, options):
    check_same(trained(get_bench, True, **options), trained(get_bench, False))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, "offload"])
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_5", "nemotron_h"])
def test_recomputing_changes_nothing_of_other_mixers(get_bench, family, checkpointing):
    ours = trained(get_bench, True, family=family, checkpointing=checkpointing, token_budget=100)
    check_same(ours, trained(get_bench, False, family=family))


def test_a_shared_token_is_computed_once(bench):
    decoder = CountingDecoder(bench.model.spec, bench.model.decoder.weights)
    items = shared_items(bench, bench.adapter())
    Trainer(decoder, bench.pool, token_budget=1000).forward_backward(items)
    assert decoder.computed == 70 + 20 + 9 + 24 + 5 + 17 + 33 + 12 + 30 + 25
    assert decoder.computed < sum(len(item.datum.chunks[0].tokens) for item in items) / 2


def test_routes_that_differ_are_not_shared(get_bench):
    """Experts that a datum's tokens have to visit are its own."""
    bench = get_bench("qwen3_moe")
    experts = next(iter(bench.model.spec.experts.values()))
    rng, tokens = np.random.default_rng(0), bench.tokens(48)
    shape = (48, len(bench.model.spec.experts), experts.per_token)
    base = rng.permuted(np.tile(np.arange(experts.n_experts), (*shape[:2], 1)), axis=-1)[..., : experts.per_token]
    other = base.copy()
    other[30:] = (other[30:] + 1) % experts.n_experts
    adapter = bench.adapter()

    def item(routes):
        datum = Datum.of_tokens(tokens, target_tokens=encode(np.array([*tokens[1:], 0])))
        routing = RoutedExperts(data=routes.astype(np.uint8).tobytes(), shape=shape)
        return TrainItem(adapter, Datum(chunks=datum.chunks, loss_inputs=datum.loss_inputs, routing=routing))

    items = [item(base), item(other), item(base)]
    data = bench.trainer.prepare(items, train=True)
    assert grow_trees(data).rows == 48 + 18
    alone = get_bench("qwen3_moe", share_prefixes=False)
    adapter_alone = alone.adapter()
    theirs = [TrainItem(adapter_alone, one.datum) for one in items]
    ours = bench.trainer.forward_backward(items), bench.gradient(adapter)
    check_same(ours, (alone.trainer.forward_backward(theirs), alone.gradient(adapter_alone)))


def test_tenants_in_one_batch_have_the_gradients_that_they_have_alone(get_bench):
    bench = get_bench()
    one, other = bench.adapter(seed=1), bench.adapter(seed=2)
    batches = [shared_items(bench, one), shared_items(bench, other)]
    bench.trainer.forward_backward([item for pair in zip(*batches, strict=True) for item in pair])
    for adapter in (one, other):
        alone = get_bench(share_prefixes=False)
        theirs = alone.adapter(seed=1 if adapter is one else 2)
        alone.trainer.forward_backward(shared_items(alone, theirs))
        check_close(bench.gradient(adapter), alone.gradient(theirs))


def test_data_that_share_nothing_have_the_bits_that_they_have_without_sharing(get_bench):
    def apart(bench, adapter):
        return bench.items([adapter], (40, 7, 33, 90, 12))

    ours, theirs = (trained(get_bench, share, make=apart, token_budget=100) for share in (True, False))
    assert all((a.logprobs == b.logprobs).all() for a, b in zip(ours[0], theirs[0], strict=True))
    assert all(torch.equal(ours[1][name], theirs[1][name]) for name in ours[1])


def test_the_same_pass_has_the_same_bits(get_bench):
    (_, one), (_, again) = trained(get_bench, True), trained(get_bench, True)
    assert all(torch.equal(one[name], again[name]) for name in one)
