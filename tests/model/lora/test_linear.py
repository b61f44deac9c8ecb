"""Many adapters in one batch: each tenant gets what it would get alone, and nothing done to one reaches another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from palestra.model import AdapterError, TrainItem, load_adapter, load_into, save_adapter
from palestra.types import AdamParams, LoraConfig, SampleRequest, SamplingParams
from tests.properties import examples

ATTN = {"train_mlp": False, "train_unembed": False}
MLP = {"train_attn": False, "train_unembed": False}
UNEMBED = {"train_attn": False, "train_mlp": False}
NO_UNEMBED = {"train_unembed": False}


def scattered_adapters(bench):
    """Ranks and flags mixed; of the alike ones only some are left, so that their slots are not consecutive."""
    alike = [bench.adapter(rank=4, seed=i) for i in range(9)]
    for i in (0, 2, 3, 6):
        bench.pool.free(alike[i])
    kept = [alike[i] for i in (8, 1, 4, 7, 5)]
    others = [
        bench.adapter(rank=16, seed=20),
        bench.adapter(rank=2, seed=21, **ATTN),
        bench.adapter(rank=4, seed=22, **MLP),
        bench.adapter(rank=3, seed=23, **UNEMBED),
        bench.adapter(rank=4, seed=24, **NO_UNEMBED),
        bench.adapter(rank=4, seed=25, alpha=7.0),
    ]
    return kept + others


def check_tenants_equal_alone(bench, items):
    """Forward, log-probabilities and gradients of a mixed batch against one call per tenant."""
    trained = [i for i in items if i.adapter is not None]
    tenants = list(dict.fromkeys(i.adapter for i in trained))
    mixed_forward = bench.trainer.forward(items)
    mixed = dict(zip(map(id, trained), bench.trainer.forward_backward(trained), strict=True))
    gradients = {a: bench.gradient(a) for a in tenants}
    bench.trainer.optim_step({a: AdamParams(learning_rate=0.0) for a in tenants})  # clears them
    for tenant in [None, *tenants]:
        mine = [i for i in items if i.adapter is tenant]
        if not mine:
            continue
        alone = bench.trainer.forward(mine)
        beside = [r for r, i in zip(mixed_forward, items, strict=True) if i.adapter is tenant]
        for a, b in zip(alone, beside, strict=True):
            assert np.abs(a.logprobs - b.logprobs).max() < 1e-5
            assert a.loss == pytest.approx(b.loss, rel=1e-5, abs=1e-4)
        if tenant is None:
            continue
        for item, result in zip(mine, bench.trainer.forward_backward(mine), strict=True):
            assert np.abs(result.logprobs - mixed[id(item)].logprobs).max() < 1e-5
            assert result.loss == pytest.approx(mixed[id(item)].loss, rel=1e-5, abs=1e-4)
        check_same_gradient(bench.gradient(tenant), gradients[tenant])


def check_same_gradient(ours, truth):
    """To 1e-5 of each matrix, and 1e-6 of the whole: some are zero but for rounding (q and k of a lone token)."""
    whole = torch.cat([g.flatten() for g in truth.values()]).norm()
    for name, gradient in ours.items():
        assert (gradient - truth[name]).norm() <= 1e-5 * truth[name].norm() + 1e-6 * whole, name


EQUAL, SMALL = [16] * 22, [2, 3, 1, 4, 2, 3, 1, 2, 2, 1, 3, 5]
RAGGED = [1, 2, 3, 17, 5, 33, 7, 64, 9, 18, 30, 4, 90, 1, 1, 40, 3]


@pytest.mark.parametrize(
    ("lengths", "base_rows"),
    [
        pytest.param(EQUAL, False, id="equal"),
        pytest.param(RAGGED, True, id="ragged-with-base"),
        pytest.param(SMALL, True, id="small-with-base"),
        pytest.param(EQUAL, True, id="equal-with-base", marks=pytest.mark.slow),
        pytest.param(RAGGED, False, id="ragged", marks=pytest.mark.slow),
        pytest.param(SMALL, False, id="small", marks=pytest.mark.slow),
    ],
)
def test_mixed_tenants_equal_alone(bench, lengths, base_rows):
    adapters = scattered_adapters(bench)
    if base_rows:
        adapters = [None, *adapters[:3], None, *adapters[3:]]
    check_tenants_equal_alone(bench, bench.items(adapters, lengths))


def test_mixed_tenants_equal_alone_over_several_micro_batches(get_bench):
    bench = get_bench(token_budget=48)
    check_tenants_equal_alone(
        bench, bench.items(scattered_adapters(bench), [1, 17, 40, 5, 33, 7, 21, 12, 60, 3, 2, 8, 16])
    )


def test_mixed_tenants_equal_alone_after_every_change_of_their_weights(bench, tmp_path):
    """Nothing gathered for an earlier batch may outlive a step, a load or a new owner of a slot."""
    adapters = scattered_adapters(bench)
    sequences = [bench.tokens(9) for _ in adapters]

    def check():
        mixed = bench.distributions(sequences, adapters)
        for tokens, adapter, found in zip(sequences, adapters, mixed, strict=True):
            assert np.abs(found - bench.distributions([tokens], [adapter])[0]).max() < 1e-5
        bench.sampler().generate([bench.request(s, max_tokens=2) for s in sequences], adapters)
        return mixed

    before = check()
    bench.trainer.forward_backward(bench.items(adapters, [9] * len(adapters)))
    bench.trainer.optim_step(dict.fromkeys(adapters, AdamParams(learning_rate=0.05)))
    after = check()
    assert all(np.abs(a - b).max() > 0.01 for a, b in zip(before, after, strict=True))
    save_adapter(adapters[0], tmp_path / "a")
    load_into(bench.pool, adapters[1], tmp_path / "a")
    check()
    bench.pool.free(adapters[2])
    adapters[2] = bench.adapter(seed=77)
    check()


@pytest.mark.parametrize("flags", [{}, ATTN, MLP, UNEMBED, NO_UNEMBED], ids=["all", "attn", "mlp", "unembed", "trunk"])
def test_only_what_is_switched_on_is_trained(bench, flags):
    adapter = bench.adapter(noise=0, **flags)
    before = bench.weights(adapter)
    parts = {"self_attn": "train_attn", "mlp": "train_mlp", "lm_head": "train_unembed"}
    for part, flag in parts.items():
        assert any(part in name for name in before) == flags.get(flag, True)
    bench.trainer.forward_backward(bench.items([adapter], [20]))
    bench.trainer.optim_step({adapter: AdamParams()})
    for name, after in bench.weights(adapter).items():
        # With B at zero only B has a gradient in the first step.
        assert torch.equal(before[name], after) == name.endswith("lora_A.weight"), name


@examples(25, derandomize=True)
@given(data=st.data())
def test_any_mix_of_tenants_equals_alone(get_bench, data):
    bench = get_bench(token_budget=data.draw(st.sampled_from([24, 64, 2048])))
    configs = [{}, {"rank": 7}, ATTN, UNEMBED, {"rank": 7, **MLP}]
    made = [
        bench.adapter(seed=i, **c)
        for i, c in enumerate(data.draw(st.lists(st.sampled_from(configs), min_size=1, max_size=8)))
    ]
    keep = data.draw(st.sets(st.sampled_from(range(len(made))), min_size=1))
    for i in set(range(len(made))) - keep:
        bench.pool.free(made[i])
    tenants = [None, *(made[i] for i in sorted(keep))]
    work = st.tuples(st.sampled_from(tenants), st.integers(1, 40))
    check_tenants_equal_alone(
        bench, [TrainItem(a, bench.datum(n)) for a, n in data.draw(st.lists(work, min_size=1, max_size=12))]
    )


# An adapter's start


@pytest.mark.parametrize("flags", [{}, ATTN, MLP, UNEMBED], ids=["all", "attn", "mlp", "unembed"])
def test_untrained_adapter_changes_nothing_exactly(bench, flags):
    adapter = bench.adapter(rank=8, noise=0, **flags)
    sequences = [bench.tokens(n) for n in (3, 20, 41)]
    base = bench.distributions(sequences)
    with_adapter = bench.distributions(sequences, [adapter] * 3)
    assert all(np.array_equal(a, b) for a, b in zip(base, with_adapter, strict=True))


def test_untrained_adapters_change_nothing_exactly_in_a_mixed_batch(bench):
    adapters = [bench.adapter(rank=r, noise=0, seed=i) for i, r in enumerate((4, 4, 8, 4))]
    bench.pool.free(adapters[1])
    sequences = [bench.tokens(n) for n in (3, 20, 41, 5)]
    mixed = bench.distributions(sequences, [adapters[0], adapters[3], adapters[2], None])
    assert all(np.array_equal(a, b) for a, b in zip(bench.distributions(sequences), mixed, strict=True))


def test_same_seed_gives_the_same_start_and_another_seed_another(get_bench):
    first, second = get_bench(), get_bench()
    second.adapter(seed=5)  # what else exists does not matter
    ones = first.weights(first.adapter(noise=0, seed=7)), second.weights(second.adapter(noise=0, seed=7))
    other = first.weights(first.adapter(noise=0, seed=8))
    assert all(torch.equal(ones[0][n], ones[1][n]) for n in ones[0])
    assert not any(torch.equal(ones[0][n], other[n]) for n in other if "lora_A" in n)


def test_without_a_seed_every_start_is_another(bench):
    a, b = (bench.weights(bench.pool.create(LoraConfig(rank=4))) for _ in range(2))
    assert not any(torch.equal(a[n], b[n]) for n in a if "lora_A" in n)


def test_start_is_pefts_default(bench):
    """A is uniform in +-1/sqrt(in), as kaiming_uniform_(a=sqrt(5)) makes it; B is zero."""
    for name, matrix in bench.weights(bench.adapter(rank=32, noise=0)).items():
        if "lora_B" in name:
            assert not matrix.any()
            continue
        bound = matrix.shape[1] ** -0.5
        assert matrix.abs().max() <= bound
        assert matrix.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert abs(matrix.mean().item()) < 0.05 * bound


def test_default_config_is_rank_32_alpha_32_everything():
    config = LoraConfig()
    assert (config.rank, config.alpha) == (32, 32.0)
    assert (config.train_attn, config.train_mlp, config.train_unembed) == (True, True, True)


@pytest.mark.parametrize("rank", [0, -1, 65, 10_000])
def test_rank_outside_the_configured_maximum_is_refused(bench, rank):
    with pytest.raises(AdapterError, match=rf"rank {rank} is outside 1\.\.64"):
        bench.pool.create(LoraConfig(rank=rank))
    assert bench.pool.size_bytes == 0
    bench.pool.create(LoraConfig(rank=64))


def test_adapter_that_trains_nothing_is_refused(bench):
    with pytest.raises(AdapterError, match="train_attn, train_mlp, train_unembed"):
        bench.pool.create(LoraConfig(train_attn=False, train_mlp=False, train_unembed=False))


# Coming and going


def state_of(adapter):
    return [adapter.row(kind).clone() for kind in ("weights", "grads", "exp_avg", "exp_avg_sq")] + [
        torch.tensor(adapter.steps)
    ]


def same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_creating_loading_saving_and_freeing_others_touches_nothing(bench, tmp_path):
    one, two = bench.adapter(seed=1), bench.adapter(seed=2)
    work = bench.items([one, two], [9, 20, 14])
    bench.trainer.forward_backward(work)
    bench.trainer.optim_step({one: AdamParams(), two: AdamParams()})
    bench.trainer.forward_backward(work)
    before = state_of(one), state_of(two)
    assert all(t.any() for t in (*before[0], *before[1]))

    newcomers = [bench.adapter(seed=10 + i) for i in range(7)]  # the stack grows more than once
    save_adapter(two, tmp_path / "two", optimizer=True)
    loaded = load_adapter(bench.pool, tmp_path / "two", optimizer=True)
    bench.trainer.forward_backward(bench.items(newcomers, [5] * 7))
    bench.trainer.optim_step({a: AdamParams(learning_rate=0.1, weight_decay=0.5) for a in newcomers})
    for adapter in (*newcomers[::2], loaded, *newcomers[1::2]):
        bench.pool.free(adapter)
    assert same(before[0], state_of(one))
    assert same(before[1], state_of(two))


def test_slot_of_a_freed_adapter_starts_clean(get_bench):
    """What the former owner left (weights, gradient, moments, step count) must not reach the next."""
    used, fresh = get_bench(), get_bench()
    for bench in (used, fresh):
        bench.adapter(seed=1)
    old = used.adapter(seed=2)
    used.trainer.forward_backward(used.items([old], [30]))
    used.trainer.optim_step({old: AdamParams()})
    used.trainer.forward_backward(used.items([old], [30]))
    used.pool.free(old)
    used.rng = np.random.default_rng(3)
    fresh.rng = np.random.default_rng(3)
    ends = []
    for bench in (used, fresh):
        adapter = bench.adapter(seed=3, noise=0)
        for _ in range(3):
            bench.trainer.forward_backward(bench.items([adapter], [20]))
            bench.trainer.optim_step({adapter: AdamParams(learning_rate=0.01)})
        ends.append(bench.weights(adapter))
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


def test_freed_adapter_is_refused_everywhere(bench):
    adapter = bench.adapter()
    item = bench.items([adapter], [4])[0]
    bench.pool.free(adapter)
    for use in (
        lambda: bench.trainer.forward([item]),
        lambda: bench.pool.snapshot(adapter),
        lambda: bench.pool.free(adapter),
        lambda: bench.sampler().submit(SampleRequest(prompt=(1,)), adapter),
    ):
        with pytest.raises(AdapterError, match="was freed"):
            use()
    assert isinstance(bench.trainer.optim_step({adapter: AdamParams()})[adapter].error, AdapterError)


def test_memory_follows_the_adapters_in_use(bench):
    pool = bench.pool
    assert pool.size_bytes == 0
    first = bench.adapter(rank=4)
    one = pool.size_bytes
    assert one == 4 * sum(t.numel() for t in bench.weights(first).values()), "no moments before training"
    more = [bench.adapter(rank=4, seed=i) for i in range(1, 20)]
    assert 20 * one <= pool.size_bytes <= 1.5 * 20 * one
    twin = pool.snapshot(first)
    assert pool.size_bytes <= 1.5 * 20 * one, "a snapshot costs nothing until the original changes"
    kept = bench.weights(more[-1])
    for adapter in (*more[:-1], twin, first):
        pool.free(adapter)
    assert pool.size_bytes <= 2 * one, "gaps are closed when half is unused"
    assert all(torch.equal(t, kept[name]) for name, t in bench.weights(more[-1]).items())
    pool.free(more[-1])
    assert pool.size_bytes == 0
    again = bench.adapter(rank=4)
    assert pool.size_bytes == one
    pool.free(again)


def test_cost_follows_the_adapters_in_the_batch_not_those_in_the_pool(get_bench):
    counts = []
    for others in (0, 30):
        bench = get_bench()
        mine = [bench.adapter(seed=100)]
        for i in range(others):
            bench.adapter(seed=i)
        mine.append(bench.adapter(seed=101))
        items = bench.items(mine, [20, 20])
        with FlopCounterMode(display=False) as counter:
            bench.trainer.forward_backward(items)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# Snapshots: the three wrong results seen in a peer


def distribution(bench, adapter, prompt):
    return bench.distributions([prompt], [adapter])[0]


def train_a_step(bench, adapter, **params):
    bench.trainer.forward_backward(bench.items([adapter], [12, 25]))
    result = bench.trainer.optim_step({adapter: AdamParams(**{"learning_rate": 0.01, **params})})[adapter]
    assert result.error is None


def test_sampling_an_older_snapshot_does_not_reset_the_adapter_in_training(get_bench):
    prompt = tuple(range(40, 60))
    ends = []
    for samples_between in (True, False):
        bench = get_bench()
        adapter, sampler = bench.adapter(noise=0), bench.sampler()
        train_a_step(bench, adapter)
        older = bench.pool.snapshot(adapter)
        for _ in range(3):
            train_a_step(bench, adapter)
            if samples_between:
                request = SampleRequest(prompt=prompt, params=SamplingParams(max_tokens=8, seed=1))
                sampler.generate([request, request], [older, adapter])
        ends.append(state_of(adapter))
    assert same(*ends)


def test_snapshot_stays_frozen_while_the_original_trains_on(bench):
    adapter, prompt = bench.adapter(), bench.tokens(30)
    bench.adapter(seed=9)
    seen = []
    for _ in range(4):
        snapshot = bench.pool.snapshot(adapter)
        seen.append((snapshot, distribution(bench, snapshot, prompt)))
        assert np.array_equal(seen[-1][1], distribution(bench, adapter, prompt))
        train_a_step(bench, adapter)
        for older, then in seen:
            assert np.array_equal(distribution(bench, older, prompt), then)
    assert not np.array_equal(seen[0][1], seen[-1][1])
    second_hand = bench.pool.snapshot(seen[0][0])  # of a snapshot
    bench.pool.free(seen[0][0])
    train_a_step(bench, adapter)
    assert np.array_equal(distribution(bench, second_hand, prompt), seen[0][1])


def test_weight_decay_on_one_tenant_does_not_change_others(bench):
    decayed, other, idle = (bench.adapter(seed=i) for i in range(3))
    snapshot = bench.pool.snapshot(idle)
    prompt = bench.tokens(20)
    before = state_of(other), state_of(idle), distribution(bench, snapshot, prompt)
    for _ in range(3):
        train_a_step(bench, decayed, weight_decay=0.9)
    assert same(before[0], state_of(other))
    assert same(before[1], state_of(idle))
    assert np.array_equal(before[2], distribution(bench, snapshot, prompt))


def test_freeing_others_between_forward_and_backward_disturbs_nothing(bench):
    adapters = [bench.adapter(seed=i) for i in range(8)]
    items = bench.items(adapters[6:], (20, 9, 14))
    bench.trainer.forward_backward(items)
    alone = [bench.gradient(a) for a in adapters[6:]]
    for a in adapters[6:]:
        bench.pool.clear_training_state(a)
    data = bench.trainer.prepare(items, train=True)
    (batch,) = bench.trainer.plan(data)
    halfway = bench.trainer.forward_micro([data[i] for i in batch.numbers], train=True)
    for a in adapters[:6]:
        bench.pool.free(a)
    bench.trainer.backward(halfway)
    for a, truth in zip(adapters[6:], alone, strict=True):
        assert all(torch.equal(t, truth[name]) for name, t in bench.gradient(a).items())


def test_snapshot_outlives_its_original(bench):
    adapter, prompt = bench.adapter(), bench.tokens(20)
    snapshot = bench.pool.snapshot(adapter)
    before = distribution(bench, snapshot, prompt)
    bench.pool.free(adapter)
    newcomer = bench.adapter(seed=3)
    train_a_step(bench, newcomer)
    assert np.array_equal(distribution(bench, snapshot, prompt), before)
    bench.pool.free(snapshot)
    bench.pool.free(newcomer)
    assert bench.pool.size_bytes == 0


def test_snapshot_is_never_trained(bench):
    adapter = bench.adapter()
    snapshot = bench.pool.snapshot(adapter)
    with pytest.raises(AdapterError, match="snapshot cannot be trained"):
        bench.trainer.forward_backward(bench.items([snapshot], [5]))
    before = state_of(adapter)
    assert isinstance(bench.trainer.optim_step({snapshot: AdamParams()})[snapshot].error, AdapterError)
    assert same(before, state_of(adapter))
    with pytest.raises(AdapterError, match="snapshot"):
        bench.pool.before_change(snapshot)


def test_refusing_a_step_on_a_snapshot_keeps_the_gradient_of_the_original(bench):
    adapter = bench.adapter()
    bench.trainer.forward_backward(bench.items([adapter], [12]))
    snapshot = bench.pool.snapshot(adapter)
    before = state_of(adapter)
    assert bench.trainer.optim_step({snapshot: AdamParams()})[snapshot].error is not None
    assert same(before, state_of(adapter))
    assert adapter.has_gradient


def test_base_model_is_never_trained(bench):
    with pytest.raises(AdapterError, match="base model cannot be trained"):
        bench.trainer.forward_backward(bench.items([None], [5]))


def test_weights_id_names_the_very_numbers(bench):
    adapter = bench.adapter(noise=0)
    first = adapter.weights_id
    snapshot = bench.pool.snapshot(adapter)
    assert snapshot.weights_id == first
    train_a_step(bench, adapter)
    assert adapter.weights_id != first == snapshot.weights_id
    assert bench.adapter(noise=0).weights_id not in (first, adapter.weights_id)


# One tenant's ruin


def test_tenant_with_ruined_weights_does_not_disturb_its_batch_mates(bench):
    ruined, *others = (bench.adapter(seed=i) for i in range(4))
    items = bench.items([None, *others], [6, 21, 5, 18])
    trained = items[1:]
    expected = bench.trainer.forward(items), bench.trainer.forward_backward(trained)
    gradients = [bench.gradient(a) for a in others]
    bench.trainer.optim_step({a: AdamParams(learning_rate=0.0) for a in others})

    train_a_step(bench, ruined, learning_rate=1e38)
    wreck = bench.items([ruined], [19, 7])
    assert not np.isfinite(bench.trainer.forward(wreck)[0].logprobs).all()
    mixed = [wreck[0], *items, wreck[1]]
    for a, b in zip(expected[0], bench.trainer.forward(mixed)[1:-1], strict=True):
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-5
    mixed = [wreck[0], *trained, wreck[1]]
    for a, b in zip(expected[1], bench.trainer.forward_backward(mixed)[1:-1], strict=True):
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-5
    for adapter, truth in zip(others, gradients, strict=True):
        check_same_gradient(bench.gradient(adapter), truth)
