"""AdamW on many adapters: torch's numbers, and one tenant's trouble is that tenant's alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from palestra.model import AdapterError, NonFiniteGradient, TrainItem
from palestra.types import AdamParams


def for_adapter(adapter, items):
    return [TrainItem(adapter, i.datum, i.loss, i.config) for i in items]


def check_equal(ours, truth):
    assert ours.keys() == truth.keys()
    assert all(torch.equal(ours[n], truth[n]) for n in ours)


def flat(matrices) -> torch.Tensor:
    return torch.cat([m.flatten() for m in matrices.values()])


def torch_twin(bench, adapter, params: AdamParams):
    """The same weights as parameters of torch's AdamW."""
    parameters = {n: torch.nn.Parameter(w) for n, w in bench.weights(adapter).items()}
    return parameters, torch.optim.AdamW(parameters.values(), lr=params.learning_rate, foreach=False, fused=False)


def torch_step(parameters, optimizer, gradient, params: AdamParams):
    for name, parameter in parameters.items():
        parameter.grad = gradient[name].clone()
    if params.grad_clip_norm > 0:
        torch.nn.utils.clip_grad_norm_(parameters.values(), params.grad_clip_norm)
    for group in optimizer.param_groups:
        group.update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
    optimizer.step()


def schedule(step: int) -> AdamParams:
    """Every hyper-parameter changes on the way."""
    return AdamParams(
        learning_rate=0.01 * (1 + math.cos(step / 4)),
        beta1=0.9 if step % 5 else 0.8,
        beta2=0.95 if step % 3 else 0.99,
        eps=1e-12 if step % 2 else 1e-8,
        weight_decay=(0.0, 0.1, 0.01)[step % 3],
        grad_clip_norm=(0.0, 5.0, 1e6, -1.0)[step % 4],
    )


@pytest.mark.parametrize(
    "params", [pytest.param(AdamParams(), marks=pytest.mark.slow), None], ids=["defaults", "schedule"]
)
def test_twenty_steps_equal_torchs_adamw(bench, params):
    adapter = bench.adapter(noise=0)
    parameters, optimizer = torch_twin(bench, adapter, AdamParams())
    for step in range(20):
        now = params or schedule(step)
        bench.trainer.forward_backward(bench.items([adapter], [15, 8]))
        torch_step(parameters, optimizer, bench.gradient(adapter), now)
        assert bench.trainer.optim_step({adapter: now})[adapter].error is None
        for name, weight in bench.weights(adapter).items():
            assert (weight - parameters[name]).abs().max() < 1e-6, (step, name)
    assert adapter.steps == 20


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999, 1.001, 100.0])
def test_clipping_equals_clip_grad_norm(bench, share):
    """The global norm over all matrices of the adapter; the second step shows the moments were clipped too."""
    adapter, bystander = bench.adapter(seed=1), bench.adapter(seed=2)
    parameters, optimizer = torch_twin(bench, adapter, AdamParams())
    for _ in range(2):
        bench.trainer.forward_backward(bench.items([adapter, bystander], [15, 8]))
        gradient = bench.gradient(adapter)
        params = AdamParams(learning_rate=0.01, eps=0.1, grad_clip_norm=share * flat(gradient).norm().item())
        torch_step(parameters, optimizer, gradient, params)
        bench.trainer.optim_step({adapter: params})
        for name, weight in bench.weights(adapter).items():
            assert (weight - parameters[name]).abs().max() < 1e-6, name


def test_steps_of_many_adapters_together_equal_one_by_one(get_bench):
    together, single = get_bench(), get_bench()
    params = [schedule(i) for i in (0, 1, 1, 2, 1, 3)]
    crowd = [together.adapter(seed=i, rank=(4, 4, 4, 7, 4, 4)[i]) for i in range(6)]
    loners = [single.adapter(seed=i, rank=(4, 4, 4, 7, 4, 4)[i]) for i in range(6)]
    for step in range(3):
        for i, (a, b) in enumerate(zip(crowd, loners, strict=True)):
            if i < step:
                continue  # not all have the same number of steps behind them
            items = together.items([a], [12, 5])
            together.trainer.forward_backward(items)
            single.trainer.forward_backward(for_adapter(b, items))
        active = range(step, 6)
        results = together.trainer.optim_step({crowd[i]: params[i] for i in active})
        for i in active:
            assert results[crowd[i]] == single.trainer.optim_step({loners[i]: params[i]})[loners[i]]
    for a, b in zip(crowd, loners, strict=True):
        check_equal(together.weights(a), single.weights(b))


def test_step_without_a_gradient_is_accepted_as_a_zero_gradient(bench):
    """Decay and momentum still act, as in torch."""
    adapter = bench.adapter()
    params = AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=1.0)
    parameters, optimizer = torch_twin(bench, adapter, params)
    nothing = {n: torch.zeros_like(p) for n, p in parameters.items()}
    for has_gradient in (False, True, False, False):
        if has_gradient:
            bench.trainer.forward_backward(bench.items([adapter], [15]))
        before = flat(bench.weights(adapter))
        torch_step(parameters, optimizer, bench.gradient(adapter) if has_gradient else nothing, params)
        result = bench.trainer.optim_step({adapter: params})[adapter]
        assert result.error is None
        assert (result.metrics["grad_norm"] > 0) == has_gradient
        assert not torch.equal(flat(bench.weights(adapter)), before)
        for name, weight in bench.weights(adapter).items():
            assert (weight - parameters[name]).abs().max() < 1e-6, name


def test_frozen_snapshots_and_freed_adapters_are_refused_alone(bench):
    good, freed = bench.adapter(seed=1), bench.adapter(seed=2)
    snapshot = bench.pool.snapshot(good)
    bench.trainer.forward_backward(bench.items([good, freed], [10, 10]))
    bench.pool.free(freed)
    before = bench.weights(snapshot)
    results = bench.trainer.optim_step({freed: AdamParams(), snapshot: AdamParams(), good: AdamParams()})
    assert isinstance(results[freed].error, AdapterError)
    assert isinstance(results[snapshot].error, AdapterError)
    assert results[good].error is None
    check_equal(bench.weights(snapshot), before)
    assert not torch.equal(flat(bench.weights(good)), flat(before))


# When a gradient is not finite


def explosive(bench, adapter) -> TrainItem:
    """A ratio of exp(10,000): the loss overflows."""
    inputs = {"advantages": np.ones(6), "logprobs": np.full(6, -1e4)}
    return TrainItem(adapter, bench.datum(6, **inputs), "importance_sampling")


def test_non_finite_gradient_is_that_tenants_error_and_leaves_its_weights(get_bench):
    bench, calm = get_bench(), get_bench()
    crowd = [bench.adapter(seed=i) for i in range(4)]
    peers = [calm.adapter(seed=i) for i in range(4)]
    params = AdamParams(learning_rate=0.01, grad_clip_norm=1.0)
    for _ in range(2):
        items = bench.items(crowd, [10, 12, 14, 9, 3])
        bench.trainer.forward_backward(items)
        calm.trainer.forward_backward([TrainItem(peers[crowd.index(i.adapter)], i.datum) for i in items])
        bench.trainer.optim_step(dict.fromkeys(crowd, params))
        calm.trainer.optim_step(dict.fromkeys(peers, params))
    victim, before = crowd[1], bench.weights(crowd[1])
    moments = [victim.row(k).clone() for k in ("exp_avg", "exp_avg_sq")]

    items = bench.items(crowd, [10, 12, 14, 9])
    bench.trainer.forward_backward([*items, explosive(bench, victim)])
    calm.trainer.forward_backward([TrainItem(peers[crowd.index(i.adapter)], i.datum) for i in items])
    results = bench.trainer.optim_step(dict.fromkeys(crowd, params))
    calm.trainer.optim_step(dict.fromkeys(peers, params))
    assert isinstance(results[victim].error, NonFiniteGradient)
    assert "weights are unchanged" in str(results[victim].error)
    check_equal(bench.weights(victim), before)
    assert all(torch.equal(victim.row(k), m) for k, m in zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
    assert victim.steps == 2
    for i in (0, 2, 3):
        assert results[crowd[i]].error is None
        assert (flat(bench.weights(crowd[i])) - flat(calm.weights(peers[i]))).abs().max() < 1e-5


def test_the_next_good_step_after_a_refused_one_works(get_bench):
    bench, calm = get_bench(), get_bench()
    adapter, peer = bench.adapter(), calm.adapter()
    bench.trainer.forward_backward([explosive(bench, adapter)])
    assert bench.trainer.optim_step({adapter: AdamParams()})[adapter].error is not None
    items = bench.items([adapter], [20])
    bench.trainer.forward_backward(items)
    assert bench.trainer.optim_step({adapter: AdamParams()})[adapter].error is None
    calm.trainer.forward_backward(for_adapter(peer, items))
    calm.trainer.optim_step({peer: AdamParams()})
    check_equal(bench.weights(adapter), calm.weights(peer))


def test_step_amid_an_unfinished_backward_is_refused_and_clears(bench):
    adapter = bench.adapter()
    before = bench.weights(adapter)
    data = bench.trainer.prepare(bench.items([adapter], [20]), train=True)
    bench.trainer.forward_micro(data[:1], train=True)
    result = bench.trainer.optim_step({adapter: AdamParams()})[adapter]
    assert result.error is not None
    assert "did not finish" in str(result.error)
    check_equal(bench.weights(adapter), before)
    assert not flat(bench.gradient(adapter)).any()
    bench.trainer.forward_backward(bench.items([adapter], [20]))
    assert bench.trainer.optim_step({adapter: AdamParams()})[adapter].error is None
