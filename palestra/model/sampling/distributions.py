"""Next-token distributions of a few rows: log-probabilities, draws, the likeliest tokens.

Owns: softmax at each row's temperature, the inverse of its cumulative sum. Never touches: penalties, filters, masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from palestra.model import kernels
from palestra.model.training.log_softmax import log_softmax
from palestra.model.transfers import to_device

DRAW_BLOCK = 64  # the inverse CDF looks for a block of the vocabulary first, then inside it


class DrawnRows(NamedTuple):
    """A token for each row."""

    tokens: Tensor
    margins: Tensor | None
    """How much probability lies between the draw and the nearest border of its token; None where the draw does not
    depend on rounding."""


class Distributions(Protocol):
    def logprobs(self, tokens: Tensor) -> Tensor:
        """float32 [rows], of one token each."""
        ...

    def draw(self, u: Tensor) -> DrawnRows:
        """The token at which the cumulative probability passes u (float64 [rows]), in vocabulary order."""
        ...

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the k likeliest, [rows, k]."""
        ...


def distributions(logits: Tensor, temperatures: Sequence[float]) -> Distributions:
    """softmax(logits / temperature). Rows at temperature 1 have the very bits that they have in training, and without
    the others."""
    if kernels.can_run_on(logits.device):
        return _KernelDistributions(logits, to_device(temperatures, logits.device, np.float32))
    return _PlainDistributions(_log_softmax(logits, temperatures))


def _log_softmax(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    if all(t == 1.0 for t in temperatures):
        return log_softmax(logits)
    temperature = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    scaled = log_softmax(logits.float() / temperature)
    if logits.dtype == torch.float32 or 1.0 not in temperatures:
        return scaled
    return torch.where(temperature == 1.0, log_softmax(logits), scaled)


class _PlainDistributions:
    def __init__(self, logp: Tensor):
        self.logp = logp

    def logprobs(self, tokens: Tensor) -> Tensor:
        return self.logp.gather(1, tokens[:, None]).squeeze(1)

    def draw(self, u: Tensor) -> DrawnRows:
        return inverse_cdf(self.logp.exp(), u)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        values, ids = self.logp.topk(k, -1)
        return values, ids


class _KernelDistributions:
    """Without a float32 copy of the logits."""

    def __init__(self, logits: Tensor, temperatures: Tensor):
        from palestra.model.kernels.head import log_sum_exp

        self.logits, self.temperatures = logits, temperatures
        self.sums = log_sum_exp(logits, temperatures)

    def logprobs(self, tokens: Tensor) -> Tensor:
        return self.logits.gather(1, tokens[:, None]).squeeze(1).float() / self.temperatures - self.sums

    def draw(self, u: Tensor) -> DrawnRows:
        from palestra.model.kernels.draw import draw_tokens

        return DrawnRows(draw_tokens(self.logits, self.sums, self.temperatures, u), None)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        values, ids = self.logits.topk(k, -1)
        return values.float() / self.temperatures[:, None] - self.sums[:, None], ids


def inverse_cdf(probabilities: Tensor, u: Tensor) -> DrawnRows:
    """The token at which the cumulative probability passes u, in vocabulary order."""
    missing = -probabilities.shape[1] % DRAW_BLOCK
    blocks = (pad(probabilities, (0, missing)) if missing else probabilities).unflatten(1, (-1, DRAW_BLOCK))
    ends = blocks.sum(-1).double().cumsum(-1)
    target = u[:, None] * ends[:, -1:]
    block = (ends <= target).sum(-1, keepdim=True).clamp_max_(ends.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, DRAW_BLOCK)).squeeze(1).double().cumsum(-1)
    # The block's own running sum may round to less than its share of the total: stay below its end.
    rest = torch.minimum(target - before, inside[:, -1:] * (1 - 1e-12))
    place = (inside <= rest).sum(-1, keepdim=True).clamp_max_(DRAW_BLOCK - 1)
    begin = torch.where(place > 0, inside.gather(1, (place - 1).clamp_min(0)), 0.0)
    margins = torch.minimum(rest - begin, inside.gather(1, place) - rest).squeeze(1)
    return DrawnRows((block * DRAW_BLOCK + place).squeeze(1).clamp_max_(probabilities.shape[1] - 1), margins)
