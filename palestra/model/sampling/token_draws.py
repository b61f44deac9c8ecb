"""From logits to tokens: the distribution of each row at its temperature, and a draw that only its own row decides.

A draw depends on its own row only, or seeded requests would change with their batch mates: its noise is a hash
(`draw_noise`), and where rounding could move it `logits_alone` decide, since a CPU's last bits depend on the clock and
must not reach tokens. On a GPU the host waits for nothing here: tokens stay on the device until they are read.
Owns: the distribution of one step. Never touches: scheduling, stop rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from palestra.model import kernels
from palestra.model.draw_noise import log_exponentials, noise_keys
from palestra.model.sampling.logit_filters import DrawRow, filter_logits, shape_logits
from palestra.model.training.log_softmax import log_softmax
from palestra.model.transfers import Readback, to_device
from palestra.types import SamplingParams

COLDEST = 1e-6  # below this, logits over temperature leave the range of floats; it is greedy long before
ROUNDING = 1e-4
"""A token drawn with so little more than the next could be another by rounding, which on a CPU depends on the other
rows of a batch. In logits; five times the largest difference allowed between two ways to compute one (2e-5)."""


@dataclass(slots=True)
class DrawnTokens:
    tokens: list[int]
    logprobs: list[float]
    raw: list[float]
    """By the unscaled model where a row asks for it, else the same as `logprobs`."""
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    """The k likeliest of each row, when asked for."""


class DeviceDraws:
    """Drawn tokens on the device, and on their way to the host."""

    def __init__(self, tokens: Tensor, logprobs: Tensor, raw: Tensor, top: tuple[Tensor, Tensor] | None):
        self.tokens = tokens
        self._readback = Readback(tokens, logprobs, raw, *(top or ()))

    def read(self) -> DrawnTokens:
        tokens, logprobs, raw, *top = (tensor.tolist() for tensor in self._readback.read())
        top_logprobs, top_ids = top or ([], [])
        return DrawnTokens(tokens, logprobs, raw, top_ids, top_logprobs)


def draw(
    logits: Tensor,
    rows: Sequence[DrawRow],
    *,
    top: int = 0,
    logits_alone: Callable[[int], Tensor] | None = None,
) -> DeviceDraws:
    """One token per row of logits. Reported log-probabilities are the model's own at the row's temperature (raw ones
    too, on request): before penalties, bias, masks, top-k, top-p and min-p.

    `logits_alone(i)`: logits of row i, [1, vocabulary], computed without the other rows. They decide draws that
    rounding could move, so that a token never depends on who shares its batch."""
    model = distributions(logits, _temperatures(rows))
    tokens, margins = _draw_tokens(logits, model, rows)
    if logits_alone is not None and margins is not None and (unclear := (margins < ROUNDING).nonzero()[:, 0]).numel():
        settled = torch.cat([logits_alone(i) for i in unclear.tolist()])
        return draw(logits.index_copy(0, unclear, settled), rows, top=top)
    chosen = raw_chosen = model.logprobs(tokens)
    likeliest = model.top(top) if top else None
    is_raw = [row.raw and row.params.temperature not in (0.0, 1.0) for row in rows]
    if any(is_raw):
        unscaled, asks = distributions(logits, [1.0] * len(rows)), to_device(is_raw, logits.device)
        raw_chosen = torch.where(asks, unscaled.logprobs(tokens), chosen)
        if likeliest is not None:
            pairs = zip(unscaled.top(top), likeliest, strict=True)
            values, ids = (torch.where(asks[:, None], own, scaled) for own, scaled in pairs)
            likeliest = values, ids
    return DeviceDraws(tokens, chosen, raw_chosen, likeliest)


def _draw_tokens(logits: Tensor, model: Distributions, rows: Sequence[DrawRow]) -> DrawnRows:
    """Rows that draw from the model itself never take another way because of the others."""
    changed = [i for i, row in enumerate(rows) if not row.is_plain or row.allowed is not None or row.is_unripe]
    if not changed:
        return _choose(model, logits, rows)
    if len(changed) == len(rows):
        return _draw_changed(logits, rows)
    index = to_device(changed, logits.device)
    tokens, margins = _choose(model, logits, rows)
    own, own_margins = _draw_changed(logits[index], [rows[i] for i in changed])
    if margins is not None and own_margins is not None:
        margins = margins.index_copy(0, index, own_margins)
    return DrawnRows(tokens.index_copy(0, index, own), margins)


def _draw_changed(logits: Tensor, rows: Sequence[DrawRow]) -> DrawnRows:
    best = shape_logits(logits.float(), rows)
    filtered = filter_logits(best / to_device(_temperatures(rows), logits.device, np.float32)[:, None], rows)
    return _choose(distributions(filtered, [1.0] * len(rows)), best, rows)


def _choose(model: Distributions, logits: Tensor, rows: Sequence[DrawRow]) -> DrawnRows:
    """Chooses by chance, or the best where the temperature is 0."""
    greedy = [p.temperature <= 0 for p in _params(rows)]
    if all(greedy):
        return _best(logits)
    keys = noise_keys([(row.seed, row.sample, len(row.generated)) for row in rows])
    drawn = model.draw(to_device(keys, logits.device))
    if drawn.margins is not None:
        drawn = DrawnRows(drawn.tokens, drawn.margins * to_device(_temperatures(rows), logits.device, np.float32))
    if not any(greedy):
        return drawn
    is_greedy, best = to_device(greedy, logits.device), _best(logits)
    margins = None
    if drawn.margins is not None and best.margins is not None:
        margins = torch.where(is_greedy, best.margins, drawn.margins)
    return DrawnRows(torch.where(is_greedy, best.tokens, drawn.tokens), margins)


def _best(logits: Tensor) -> DrawnRows:
    return DrawnRows(logits.argmax(-1), None) if kernels.can_run_on(logits.device) else _largest(logits.float())


def _largest(scores: Tensor) -> DrawnRows:
    first, tokens = scores.max(-1, keepdim=True)
    second = scores.scatter(1, tokens, -torch.inf).amax(-1, keepdim=True)
    return DrawnRows(tokens.squeeze(1), (first - second).squeeze(1))


class DrawnRows(NamedTuple):
    """A token for each row."""

    tokens: Tensor
    margins: Tensor | None
    """How far the next best token is behind, in logits; None where the draw does not depend on rounding."""


class Distributions(Protocol):
    def logprobs(self, tokens: Tensor) -> Tensor:
        """float32 [rows], of one token each."""
        ...

    def draw(self, keys: Tensor) -> DrawnRows:
        """The token whose log-probability is largest with the noise of its row's key. Margins are by temperature."""
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

    def draw(self, keys: Tensor) -> DrawnRows:
        return _largest(self.logp - log_exponentials(keys, self.logp.shape[1]))

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

    def draw(self, keys: Tensor) -> DrawnRows:
        from palestra.model.kernels.draw import draw_tokens

        return DrawnRows(draw_tokens(self.logits, self.temperatures, keys), None)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        values, ids = self.logits.topk(k, -1)
        return values.float() / self.temperatures[:, None] - self.sums[:, None], ids


def draw_many(logits: Tensor, temperature: float, u: Tensor) -> Tensor:
    """Draws for each row of logits as many tokens as `u` has columns, with replacement, without filters."""
    if temperature <= 0:
        return logits.argmax(-1, keepdim=True).expand(-1, u.shape[1])
    ends = torch.softmax(logits / max(temperature, COLDEST), -1).double().cumsum(-1)
    target = u.clamp_max(1 - 1e-12) * ends[:, -1:]
    return torch.searchsorted(ends, target, right=True).clamp_max_(logits.shape[1] - 1)


def _params(rows: Sequence[DrawRow]) -> list[SamplingParams]:
    return [r.params for r in rows]


def _temperatures(rows: Sequence[DrawRow]) -> list[float]:
    """Returns the temperatures of reported log-probabilities: 1 where the draw is greedy."""
    return [max(p.temperature, COLDEST) if p.temperature > 0 else 1.0 for p in _params(rows)]
