"""Losses by name: what each needs, and its value per position from the log-probabilities of the targets.

Notation as in the papers: lp = log p(target) now, q = log p when it was sampled, A = advantage, r = exp(lp - q).
All are sums, never means. A position whose weight or advantage is 0 contributes exactly 0: it is masked before any
exponential. Gradients come from autograd over these few lines.

A loss compares with the sampler by `_moved`: on a CPU the sampler's last bits depend on the clock, and must not reach
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.errors import DataError
from palestra.types import LossName
from palestra.types.training import LOGPROB_ROUNDING
from palestra.util.suggest import nearest

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Loss:
    name: LossName
    value: Callable[[Tensor, Inputs, Config, list[int]], Tensor]
    """(lp, inputs, config, rows of each datum) -> loss per position, all shaped like lp."""
    gate: str
    """The input whose zeros switch a position off."""
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    defaults: dict[str, float] = field(default_factory=dict)
    whole_sequence: bool = False
    """A position's gradient depends on the rest of its datum, so all of lp is needed first."""

    @property
    def is_of_samples(self) -> bool:
        """Whether it learns from tokens that a policy has drawn; then the entropy at each of them is reported."""
        return self.gate == "advantages"

    def settle(self, config: Mapping[str, float] | None) -> dict[str, float]:
        """The defaults with this request's values on top; unknown keys are refused."""
        config = dict(config or {})
        for key, value in config.items():
            if key in self.defaults and (not isinstance(value, int | float) or not math.isfinite(value)):
                raise DataError(f"loss {self.name.value!r}: setting {key!r} is {value!r}; it must be a number")
            if key not in self.defaults:
                known = ", ".join(self.defaults) or "none"
                raise DataError(f"loss {self.name.value!r} has no setting {key!r}; it knows: {known}")
        if config.get(DUAL_CLIP, 0.0) and config[DUAL_CLIP] <= 1:
            raise DataError(f"loss {self.name.value!r}: setting {DUAL_CLIP!r} must be above 1, or 0 to be off")
        return {**self.defaults, **config}


def loss_named(name: str) -> Loss:
    found = LOSSES.get(name)
    if found is None:
        near = nearest(name, LOSSES)
        hint = f"; did you mean {near!r}?" if near else ""
        raise DataError(f"unknown loss {name!r}{hint} (known: {', '.join(LOSSES)})")
    return found


def _cross_entropy(lp: Tensor, x: Inputs, c: Config, rows: list[int]) -> Tensor:
    return torch.where(x["weights"] != 0, -x["weights"] * lp, 0.0)


def _log_ratio(lp: Tensor, x: Inputs) -> Tensor:
    return torch.where(x["advantages"] != 0, _moved(lp, x["logprobs"]), 0.0)


def _moved(lp: Tensor, old: Tensor) -> Tensor:
    """lp - q. A difference that is no more than rounding is 0 (its gradient stays): a sampler's last bits depend on
    who shared its batch, and those of the gradient must not."""
    moved = lp - old
    return torch.where(moved.detach().abs() < LOGPROB_ROUNDING, lp - lp.detach(), moved)


def _importance_sampling(lp: Tensor, x: Inputs, c: Config, rows: list[int]) -> Tensor:
    return -_log_ratio(lp, x).exp() * x["advantages"]


def _ppo(lp: Tensor, x: Inputs, c: Config, rows: list[int]) -> Tensor:
    return _clipped_surrogate(_log_ratio(lp, x), 1.0, x, c)


def _cispo(lp: Tensor, x: Inputs, c: Config, rows: list[int]) -> Tensor:
    weight = _clip(_log_ratio(lp.detach(), x).exp(), x, c)
    return torch.where(x["advantages"] != 0, -weight * lp * x["advantages"], 0.0)


def _dro(lp: Tensor, x: Inputs, c: Config, rows: list[int]) -> Tensor:
    active = x["advantages"] != 0
    return torch.where(active, -lp * x["advantages"], 0.0) + 0.5 * c["beta"] * _log_ratio(lp, x).square()


def _gspo(lp: Tensor, x: Inputs, c: Config, rows: list[int]) -> Tensor:
    mask = x["sequence_ratio_mask"] if "sequence_ratio_mask" in x else (x["advantages"] != 0).to(lp.dtype)
    delta = torch.where(mask != 0, _moved(lp.detach(), x["logprobs"]) * mask, 0.0)
    means = [d.sum() / m.sum().clamp_min(1e-9) for d, m in zip(delta.split(rows), mask.split(rows), strict=True)]
    sequence_ratio = torch.cat([m.exp().expand(n, *lp.shape[1:]) for m, n in zip(means, rows, strict=True)])
    # The value is the sequence's ratio; the gradient reaches each token through its own log-probability.
    own = torch.where(x["advantages"] != 0, lp - lp.detach(), 0.0)
    return _clipped_surrogate(own, sequence_ratio, x, c)


def _clip(ratio: Tensor, x: Inputs, c: Config) -> Tensor:
    low, high = (x.get(name, c[name]) for name in CLIPS)
    return torch.maximum(torch.minimum(ratio, _like(high, ratio)), _like(low, ratio))


def _like(bound: Tensor | float, ratio: Tensor) -> Tensor:
    return bound if isinstance(bound, Tensor) else ratio.new_tensor(bound)


def _clipped_surrogate(log_ratio: Tensor, scale: Tensor | float, x: Inputs, c: Config) -> Tensor:
    """-min(r A, clip(r) A) with r = scale * exp(log_ratio); with dual clip, where A < 0, -max(that min, dual_clip * A):
    clip alone leaves the pull on a token unbounded that has become likelier although its advantage is negative."""
    advantages = x["advantages"]
    with torch.no_grad():
        ratio = scale * log_ratio.exp()
        clipped = _clip(ratio, x, c) * advantages
        # Inside the bounds both branches are the same number: take the plain one, so the gradient is exact there.
        plain = ratio * advantages <= clipped
        if dual_clip := c.get(DUAL_CLIP):
            bound = dual_clip * advantages
            is_beyond = (advantages < 0) & (torch.where(plain, ratio * advantages, clipped) < bound)
            clipped, plain = torch.where(is_beyond, bound, clipped), plain & ~is_beyond
    # A ratio too large for floats has no gradient once it is clipped: keep it out of the exponential.
    kept = torch.where(plain, log_ratio, 0.0)
    return -torch.where(plain, scale * kept.exp() * advantages, clipped)


CLIPS = ("clip_low_threshold", "clip_high_threshold")
DUAL_CLIP = "dual_clip"
_RL = ("logprobs", "advantages")
_PPO_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_N = LossName

LOSSES: dict[str, Loss] = {
    loss.name.value: loss
    for loss in (
        Loss(_N.CROSS_ENTROPY, _cross_entropy, "weights", optional=("weights",)),
        Loss(_N.IMPORTANCE_SAMPLING, _importance_sampling, "advantages", _RL),
        Loss(_N.PPO, _ppo, "advantages", _RL, CLIPS, {**_PPO_CLIPS, DUAL_CLIP: 0.0}),
        Loss(_N.CISPO, _cispo, "advantages", _RL, CLIPS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        Loss(_N.DRO, _dro, "advantages", _RL, defaults={"beta": 0.05}),
        Loss(
            _N.GSPO,
            _gspo,
            "advantages",
            _RL,
            ("sequence_ratio_mask", *CLIPS),
            dict(_PPO_CLIPS),
            whole_sequence=True,
        ),
    )
}


def datum_metrics(loss: Loss, lp: NDArray, inputs: Mapping[str, NDArray], config: Config) -> dict[str, float]:
    """Returns what one datum reports besides its loss; names end in how they combine."""
    active = inputs[loss.gate] != 0
    found = {"positions:sum": float(active.sum())}
    if "logprobs" in inputs:
        log_ratio = np.where(active, lp - inputs["logprobs"], 0.0)
        found["kl_sampler_trainer:sum"] = float(-log_ratio.sum())
        with np.errstate(over="ignore"):
            ratio = np.exp(log_ratio)
        found["ratio:max"] = float(ratio[active].max(initial=0.0))
        if CLIPS[0] in config and not loss.whole_sequence:
            low, high = (inputs.get(name, config[name]) for name in CLIPS)
            found["clipped:sum"] = float((active & ((ratio < low) | (ratio > high))).sum())
    return found


def combine_metrics(parts: list[dict[str, float]]) -> dict[str, float]:
    """Joins metrics of many data by the reduction in their names."""
    joined: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in joined:
                joined[name] = value
            elif name.endswith(":max"):
                joined[name] = max(joined[name], value)
            else:
                joined[name] += value
    return joined
