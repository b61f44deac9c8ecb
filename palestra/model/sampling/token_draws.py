"""From logits to tokens: the distribution of each row at its temperature, and a draw that only its own row decides.

Randomness is a hash of (seed, sample index, position): no generator has a state, so batch mates, preemption and
restarts change nothing. On a GPU the host waits for nothing here: tokens stay on the device until they are read.
Owns: the distribution of one step. Never touches: scheduling, stop rules.

A draw depends on its own row only, or seeded requests would change with their batch mates; it is made by `draw` with
`logits_alone`, since a CPU's last bits depend on the clock and must not reach tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from palestra.model import kernels
from palestra.model.sampling.logit_filters import DrawRow, filter_logits, shape_logits
from palestra.model.training.log_softmax import log_softmax
from palestra.model.transfers import Readback, to_device
from palestra.types import SamplingParams
from palestra.types.sampling import SEED_STEP, SEEDS

COLDEST = 1e-6  # below this, logits over temperature leave the range of floats; it is greedy long before
ROUNDING = 1e-5
"""A draw this near to another token could be moved by rounding, which on a CPU depends on the other rows of a batch.
Ten times the difference seen in cumulative probabilities (1e-6)."""
DRAW_BLOCK = 64  # the inverse CDF looks for a block of the vocabulary first, then inside it


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
    drawn = model.draw(uniforms(rows, logits.device))
    if not any(greedy):
        return drawn
    is_greedy, best = to_device(greedy, logits.device), _best(logits)
    margins = None
    if drawn.margins is not None and best.margins is not None:
        margins = torch.where(is_greedy, best.margins, drawn.margins)
    return DrawnRows(torch.where(is_greedy, best.tokens, drawn.tokens), margins)


def _best(logits: Tensor) -> DrawnRows:
    tokens = logits.argmax(-1)
    if kernels.can_run_on(logits.device):
        return DrawnRows(tokens, None)
    first, second = logits.float().topk(2, -1).values.unbind(-1)
    return DrawnRows(tokens, (first - second).double())


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


def draw_many(logits: Tensor, temperature: float, u: Tensor) -> Tensor:
    """Draws for each row of logits as many tokens as `u` has columns, with replacement, without filters."""
    if temperature <= 0:
        return logits.argmax(-1, keepdim=True).expand(-1, u.shape[1])
    ends = torch.softmax(logits / max(temperature, COLDEST), -1).double().cumsum(-1)
    target = u.clamp_max(1 - 1e-12) * ends[:, -1:]
    return torch.searchsorted(ends, target, right=True).clamp_max_(logits.shape[1] - 1)


def uniforms(rows: Sequence[DrawRow], device: torch.device | str = "cpu") -> Tensor:
    """One number in [0, 1) per row, from (seed, sample, position) alone."""
    seed = np.array([r.seed & _MASK for r in rows], np.uint64)
    sample = np.array([r.sample for r in rows], np.uint64)
    position = np.array([len(r.generated) for r in rows], np.uint64)
    return to_device(_uniform(seed, sample, position), device)


def uniform_grid(seed: int, start: int, stop: int, k: int) -> Tensor:
    """The same for prompt positions: [stop - start, k], as samples that no request has."""
    samples = _PROMPT_DRAWS + np.arange(k, dtype=np.uint64)
    positions = np.arange(start, stop, dtype=np.uint64)[:, None]
    return torch.from_numpy(_uniform(np.array([[seed & _MASK]], np.uint64), samples, positions))


def _uniform(seed: NDArray[np.uint64], sample: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[np.float64]:
    own_seed = (seed + sample * _SAMPLE_STEP) & np.uint64(SEEDS - 1)  # as `sample_seed`
    mixed = _mix(_mix(own_seed) + position * _POSITION_STEP)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


_MASK = (1 << 64) - 1
_PROMPT_DRAWS = np.uint64(1 << 40)  # samples of a request are numbered from 0
# Odd constants with well-mixed bits: neighbouring samples and positions start far apart.
_SAMPLE_STEP, _POSITION_STEP = np.uint64(SEED_STEP), np.uint64(0xD1B54A32D192ED03)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every input bit reaches every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _params(rows: Sequence[DrawRow]) -> list[SamplingParams]:
    return [r.params for r in rows]


def _temperatures(rows: Sequence[DrawRow]) -> list[float]:
    """Returns the temperatures of reported log-probabilities: 1 where the draw is greedy."""
    return [max(p.temperature, COLDEST) if p.temperature > 0 else 1.0 for p in _params(rows)]
