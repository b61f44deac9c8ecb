"""Experts: every row gets its own, whoever stands beside it, and every adapter its own gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.model import TrainItem, router_metrics
from palestra.model.loading.layer_spec import ExpertsSpec
from palestra.model.mlp.routing import Dispatch, choose_experts


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 9))
def test_every_pair_is_dispatched_once_and_found_again(rows, k, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.stack([torch.randperm(6, generator=generator)[:k] for _ in range(rows)])
    dispatch = Dispatch.of(numbers, 6)
    assert dispatch.order.sort().values.tolist() == list(range(rows * k))
    assert torch.equal(dispatch.order[dispatch.places], torch.arange(rows * k).view(rows, k))
    covered = []
    for expert, start, end in dispatch.spans:
        pairs = dispatch.order[start:end]
        assert (numbers.flatten()[pairs] == expert).all()
        assert pairs.tolist() == sorted(pairs.tolist())
        covered += range(start, end)
    assert covered == list(range(rows * k))
    summed = dispatch.sum_pairs(dispatch.order[:, None].float(), torch.ones(rows, k))
    assert torch.equal(summed[:, 0], torch.arange(rows * k).view(rows, k).sum(1).float())


@pytest.mark.parametrize("normalises", [False, True])
def test_weights_are_shares_of_the_routers_softmax(normalises):
    torch.manual_seed(0)
    x, router = torch.randn(5, 16), torch.randn(8, 16)
    weights, numbers = choose_experts(x, router, None, ExpertsSpec(8, 3, 4, normalises))
    truth, expected = torch.softmax(x @ router.T, -1).topk(3)
    assert torch.equal(numbers, expected)
    assert torch.allclose(weights, truth / truth.sum(-1, keepdim=True) if normalises else truth)


def test_adapters_of_mixed_ranks_and_layouts_share_a_batch(get_bench):
    """Each gets the log-probabilities and the gradient it gets alone, the base model's rows among them."""
    together, alone = get_bench("qwen3_moe"), get_bench("qwen3_moe")
    shapes = [{"rank": 3}, {"rank": 8}, {"rank": 4, "per_expert": True}, {"rank": 3, "train_attn": False}]
    items = together.items([together.adapter(seed=i, **shape) for i, shape in enumerate(shapes)], (9, 30, 8, 17, 12, 5))
    results = together.trainer.forward_backward(items)
    for i, shape in enumerate(shapes):
        own = [n for n in range(len(items)) if n % len(shapes) == i]
        adapter = alone.adapter(seed=i, **shape)
        expected = alone.trainer.forward_backward([TrainItem(adapter, items[n].datum) for n in own])
        for n, result in zip(own, expected, strict=True):
            assert np.abs(results[n].logprobs - result.logprobs).max() < 1e-4
        shared = items[i].adapter
        assert shared is not None
        truth = alone.gradient(adapter)
        for name, gradient in together.gradient(shared).items():
            assert torch.linalg.norm(gradient - truth[name]) <= 1e-4 * torch.linalg.norm(truth[name]), name


def test_experts_alone_are_trained_from_the_first_layer_on(get_bench):
    bench = get_bench("qwen3_moe")
    adapter = bench.adapter(train_attn=False, train_unembed=False)
    bench.trainer.forward_backward(bench.items([adapter], (20, 3)))
    gradients = bench.gradient(adapter)
    assert gradients.keys() == {
        f"model.layers.{layer}.mlp.experts.w{i}.lora_{x}.weight" for layer in range(2) for i in (1, 2, 3) for x in "AB"
    }
    assert all(torch.linalg.norm(gradient) > 0 for gradient in gradients.values())


def test_visits_are_counted_for_each_datum_and_become_tinkers_metrics(get_bench):
    bench = get_bench("qwen3_moe", token_budget=16)
    items = bench.items([bench.adapter()], (9, 1, 30))
    results = bench.trainer.forward_backward(items)
    for n, result in zip((9, 1, 30), results, strict=True):
        assert result.visits.shape == (2, 8)
        assert result.visits.sum(1).tolist() == [2 * n, 2 * n]
    again = bench.trainer.forward(items[2:])[0]
    assert np.array_equal(again.visits, results[2].visits)


def test_router_metrics_are_what_tinker_says_they_are():
    visits = [np.array([[3, 1, 0, 0], [1, 1, 1, 1]]), np.array([[3, 1, 0, 0], [1, 1, 1, 1]])]
    assert router_metrics(visits) == {
        "e_frac_with_tokens:mean": 0.75,
        "e_frac_oversubscribed:mean": 0.125,
        "e_max_violation:mean": 1.0,
        "e_max_violation:max": 2.0,
        "e_min_violation:mean": -0.5,
    }
    assert router_metrics([None, None]) == {}
