"""One launch for all adapters: torch's numbers, and bits that do not depend on who steps beside an adapter."""

from __future__ import annotations

import pytest
import torch

from palestra.types import AdamParams
from tests.model.training.test_optimizer import check_equal, for_adapter, schedule, torch_step, torch_twin


def test_steps_equal_torchs_adamw(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = bench.adapter(rank=2, noise=0)
    parameters, optimizer = torch_twin(bench, adapter, AdamParams())
    for step in range(4):
        bench.trainer.forward_backward(bench.items([adapter], [15, 8]))
        torch_step(parameters, optimizer, bench.gradient(adapter), schedule(step))
        with monkeypatch.context() as patch:
            patch.setattr("palestra.model.kernels.interpreted", not torch.cuda.is_available())
            assert bench.trainer.optim_step({adapter: schedule(step)})[adapter].error is None
        for name, weight in bench.weights(adapter).items():
            assert (weight - parameters[name]).abs().max() < 1e-6, (step, name)


def test_adapters_of_any_settings_step_at_once_as_they_do_alone(get_bench, monkeypatch: pytest.MonkeyPatch) -> None:
    together, single = get_bench(), get_bench()
    crowd, loners = ([b.adapter(seed=i, rank=(4, 4, 7)[i]) for i in range(3)] for b in (together, single))
    for step in range(2):
        for a, b in zip(crowd[step:], loners[step:], strict=True):  # not all have the same number of steps behind them
            items = together.items([a], [12, 5])
            together.trainer.forward_backward(items)
            single.trainer.forward_backward(for_adapter(b, items))
        with monkeypatch.context() as patch:
            patch.setattr("palestra.model.kernels.interpreted", not torch.cuda.is_available())
            together.trainer.optim_step({a: schedule(i) for i, a in enumerate(crowd) if i >= step})
            for i, b in enumerate(loners[step:], step):
                single.trainer.optim_step({b: schedule(i)})
    for a, b in zip(crowd, loners, strict=True):
        check_equal(together.weights(a), single.weights(b))
