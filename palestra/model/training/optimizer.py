"""AdamW on adapter rows: many adapters in one call, each with its own settings.

On a CPU by torch's own fused code, a call for each settings; on a GPU by one launch for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.optim.adamw import adamw

from palestra.model import kernels
from palestra.model.errors import AdapterError, DataError, ModelError, NonFiniteGradient
from palestra.model.lora.adapters import Adapter, AdapterPool, Rows
from palestra.model.transfers import to_device
from palestra.types import AdamParams


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one adapter's optimizer step: metrics, or the error with which it was refused."""

    metrics: dict[str, float] = field(default_factory=dict)
    """`grad_norm` before clipping; empty if the step was refused."""
    error: ModelError | None = None
    """Set when the step was refused: weights and moments are unchanged. So is the gradient, unless the gradient was the
    cause: then it is cleared."""


def optim_step(pool: AdapterPool, steps: Mapping[Adapter, AdamParams]) -> dict[Adapter, StepResult]:
    """Applies and clears the accumulated gradients. One adapter's trouble is that adapter's error alone."""
    results: dict[Adapter, StepResult] = {}
    due: dict[Adapter, AdamParams] = {}
    # A dot product, not vector_norm: on a CPU it uses all cores and takes 40 % of the time.
    squares = {a: torch.dot(a.row("grads"), a.row("grads")) for a in steps if not a.freed and a.has_gradient}
    values = dict(zip(squares, torch.stack(list(squares.values())).sqrt().tolist(), strict=True)) if squares else {}
    for adapter, params in steps.items():
        norm = values.get(adapter, 0.0)
        error = _refusal(pool, adapter, params, norm)
        if error is None:
            due[adapter] = params
            results[adapter] = StepResult({"grad_norm": norm})
        else:
            results[adapter] = StepResult(error=error)
            if isinstance(error, NonFiniteGradient):
                pool.discard_gradient(adapter)
    for adapter in due:
        pool.before_change(adapter)
    shares = {a: _clip_share(params, values.get(a, 0.0)) for a, params in due.items()}
    if due and kernels.can_run_on(pool.device):
        _apply_at_once(pool, due, shares)
    else:
        _apply_by_settings(pool, due, shares)
    for adapter in due:
        adapter.steps += 1
        pool.discard_gradient(adapter)
        pool.after_change(adapter)
    return results


def _refusal(pool: AdapterPool, adapter: Adapter, params: AdamParams, norm: float) -> ModelError | None:
    try:
        pool.require(adapter)
        _check(params)
        if adapter.frozen:
            raise AdapterError("this adapter is a snapshot for sampling; train the original")
        if adapter.unfinished:
            raise NonFiniteGradient(
                "a backward pass did not finish, so the gradient was discarded; send the data again"
            )
        if not math.isfinite(norm):
            raise NonFiniteGradient(
                f"the accumulated gradient has norm {norm}: the step was refused, weights are unchanged and the "
                "gradient was cleared; look for extreme ratios or weights in the last data"
            )
    except ModelError as e:
        return e
    return None


def _check(params: AdamParams) -> None:
    for name in params.__struct_fields__:
        value = getattr(params, name)
        fine = 0 <= value < 1 if name in ("beta1", "beta2") else math.isfinite(value)
        if not fine or (value < 0 and name != "grad_clip_norm"):
            expected = "at least 0 and below 1" if name in ("beta1", "beta2") else "a number, 0 or more"
            raise DataError(f"{name} is {value}; it must be {expected}")


def _clip_share(params: AdamParams, norm: float) -> float:
    """Returns the share of a gradient that clipping leaves; torch's clip_grad_norm_ has the same 1e-6."""
    return params.grad_clip_norm / (norm + 1e-6) if 0 < params.grad_clip_norm < norm else 1.0


def _apply_at_once(pool: AdapterPool, due: Mapping[Adapter, AdamParams], shares: Mapping[Adapter, float]) -> None:
    from palestra.model.kernels.adamw import adamw_rows
    from palestra.model.lora.tiles import addresses

    adapters = list(due)
    kinds: tuple[Rows, ...] = ("weights", "grads", "exp_avg", "exp_avg_sq")
    sizes = np.array([a.stack.layout.size for a in adapters], np.int64)
    places = np.stack([sizes, *(addresses(adapters, kind) for kind in kinds)], 1)
    settings = [
        (
            *(shares[a], 1 - p.beta1, p.beta2, 1 - p.beta2, p.learning_rate * p.weight_decay),
            *(p.learning_rate / (1 - p.beta1 ** (a.steps + 1)), math.sqrt(1 - p.beta2 ** (a.steps + 1)), p.eps),
        )
        for a, p in due.items()
    ]
    adamw_rows(to_device(places, pool.device), to_device(settings, pool.device, np.float32), int(sizes.max()))


def _apply_by_settings(pool: AdapterPool, due: Mapping[Adapter, AdamParams], shares: Mapping[Adapter, float]) -> None:
    for adapter, share in shares.items():
        if share < 1:
            adapter.row("grads").mul_(share)
    for params in dict.fromkeys(due.values()):
        adapters = [a for a, p in due.items() if p == params]
        adamw(
            [a.row("weights") for a in adapters],
            [a.row("grads") for a in adapters],
            [a.row("exp_avg") for a in adapters],
            [a.row("exp_avg_sq") for a in adapters],
            [],
            list(to_device([a.steps for a in adapters], pool.device, np.float32)),
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            weight_decay=params.weight_decay,
            eps=params.eps,
        )
