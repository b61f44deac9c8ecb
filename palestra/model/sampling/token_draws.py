"""From logits to tokens: temperature, filters, penalties, and a draw that only its own row decides.

Randomness is a hash of (seed, sample index, position): no generator has a state, so batch mates, preemption and
restarts change nothing. On a GPU the host waits for nothing here: tokens stay on the device until they are read.
Owns: the distribution of one step. Never touches: scheduling, stop rules.

A draw depends on its own row only, or seeded requests would change with their batch mates; it is made by `draw` with
`logits_alone`, since a CPU's last bits depend on the clock and must not reach tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model import kernels
from palestra.model.sampling.distributions import Distributions, DrawnRows, distributions
from palestra.model.transfers import Readback, to_device
from palestra.types import SamplingParams
from palestra.types.sampling import SEED_STEP, SEEDS

COLDEST = 1e-6  # below this, logits over temperature leave the range of floats; it is greedy long before
ROUNDING = 1e-5
"""A draw this near to another token could be moved by rounding, which on a CPU depends on the other rows of a batch.
Ten times the difference seen in cumulative probabilities (1e-6)."""
FIRST_CANDIDATES = 128  # top-p looks at these before it sorts the whole vocabulary


class TokenMask(Protocol):
    """A grammar or any other rule: which tokens may come next."""

    def allowed(self, generated: Sequence[int]) -> Tensor | None:
        """A bool tensor over the vocabulary, or None when all are allowed. With none of them, the sequence is over."""
        ...


@dataclass(slots=True)
class DrawRow:
    """One sequence about to get its next token."""

    params: SamplingParams
    seed: int
    sample: int
    prompt: Sequence[int]
    generated: Sequence[int]
    stop_ids: tuple[int, ...] = ()
    raw: bool = False
    """Also the log-probabilities of the unscaled model."""
    allowed: Tensor | None = None
    """What its mask lets through at this step: bool over the vocabulary, never empty; None lets everything through."""
    is_plain: bool = field(init=False)
    """Whether its parameters let it draw from the model's own distribution."""

    def __post_init__(self) -> None:
        self.is_plain = not (_has_filter(self.params) or _has_penalty(self.params) or self.params.logit_bias)


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
    changed = [i for i, row in enumerate(rows) if not row.is_plain or row.allowed is not None or _is_unripe(row)]
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
    best = _shape(logits.float(), rows)
    filtered = _filter(best / to_device(_temperatures(rows), logits.device, np.float32)[:, None], rows)
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


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return to_device(values, like.device, np.float32).to(like.dtype)[:, None]


def _temperatures(rows: Sequence[DrawRow]) -> list[float]:
    """Returns the temperatures of reported log-probabilities: 1 where the draw is greedy."""
    return [max(p.temperature, COLDEST) if p.temperature > 0 else 1.0 for p in _params(rows)]


def _has_filter(p: SamplingParams) -> bool:
    return p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)


def _has_penalty(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or bool(p.presence_penalty) or bool(p.frequency_penalty)


def _is_unripe(row: DrawRow) -> bool:
    """Whether it is too early for a stop token."""
    return len(row.generated) < row.params.min_tokens and bool(row.stop_ids)


def _shape(logits: Tensor, rows: Sequence[DrawRow]) -> Tensor:
    """Logits after masks, penalties, bias and unripe stop tokens: a changed copy, or the same where there are none."""
    changed = _masked(logits, rows)
    for i, row in enumerate(rows):
        p = row.params
        if not _has_penalty(p) and not p.logit_bias and not _is_unripe(row):
            continue
        changed = logits.clone() if changed is None else changed
        if _has_penalty(p):
            _penalise(changed[i], row)
        if p.logit_bias:
            ids = to_device(list(p.logit_bias), logits.device, np.int64)
            changed[i].index_add_(0, ids, _column(logits, list(p.logit_bias.values())).squeeze(1))
        if _is_unripe(row) and _something_else_is_left(row):
            changed[i].index_fill_(0, to_device(row.stop_ids, logits.device, np.int64), -torch.inf)
    return logits if changed is None else changed


def _masked(logits: Tensor, rows: Sequence[DrawRow]) -> Tensor | None:
    """-inf for what masks exclude: all of them at once, since a pass over the vocabulary for each would add up."""
    numbers = [i for i, row in enumerate(rows) if row.allowed is not None]
    if not numbers:
        return None
    allowed = to_device([row.allowed.numpy() for row in rows if row.allowed is not None], logits.device)
    if len(numbers) == len(rows):
        return torch.where(allowed, logits, -torch.inf)
    index = to_device(numbers, logits.device)
    return logits.index_copy(0, index, torch.where(allowed, logits[index], -torch.inf))


def _something_else_is_left(row: DrawRow) -> bool:
    """Whether a row may draw anything but a stop token: a mask may insist on one before `min_tokens`."""
    stops = {t for t in row.stop_ids if row.allowed is None or row.allowed[t]}
    return row.allowed is None or int(row.allowed.sum()) > len(stops)


def _penalise(logits: Tensor, row: DrawRow) -> None:
    p = row.params
    if p.repetition_penalty != 1.0:
        seen = to_device(sorted({*row.prompt, *row.generated}), logits.device, np.int64)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if row.generated and (p.presence_penalty or p.frequency_penalty):
        ids, counts = np.unique(row.generated, return_counts=True)
        penalties = np.float32(p.presence_penalty) + np.float32(p.frequency_penalty) * counts.astype(np.float32)
        logits[to_device(ids, logits.device)] -= to_device(penalties, logits.device)


def _filter(scaled: Tensor, rows: Sequence[DrawRow]) -> Tensor:
    """-inf for what top-k, then top-p, then min-p exclude. Rows without a filter are untouched."""
    numbers = [i for i, r in enumerate(rows) if _has_filter(r.params)]
    if not numbers:
        return scaled
    chosen = [rows[i].params for i in numbers]
    index = to_device(numbers, scaled.device)
    part = scaled.index_select(0, index)
    size = part.shape[1]
    ks = [min(p.top_k, size) if p.top_k > 0 else size for p in chosen]
    if min(ks) < size:
        limited = max(k for k in ks if k < size)
        kth = to_device([min(k, limited) - 1 for k in ks], part.device)[:, None]
        threshold = part.topk(limited, -1).values.gather(1, kth)
        unlimited = to_device([k == size for k in ks], part.device)[:, None]
        part = part.masked_fill((part < threshold) & ~unlimited, -torch.inf)
    if any(p.top_p < 1.0 for p in chosen):
        part = part.masked_fill(part < _nucleus(part, [p.top_p for p in chosen]), -torch.inf)
    if any(p.min_p > 0.0 for p in chosen):
        floor = torch.log(_column(part, [p.min_p for p in chosen]))
        part = part.masked_fill(part < part.amax(-1, keepdim=True) + floor, -torch.inf)
    return scaled.index_copy(0, index, part)


def _nucleus(logits: Tensor, top_p: list[float]) -> Tensor:
    """The smallest logit of the smallest set whose probability reaches top_p; -inf where top_p is 1 or more."""
    wanted, size = _column(logits, top_p), logits.shape[1]
    if kernels.can_run_on(logits.device):
        from palestra.model.kernels.draw import nucleus

        return nucleus(logits, wanted)
    total = logits.logsumexp(-1, keepdim=True)
    for k in (min(FIRST_CANDIDATES, size), size):
        values = logits.topk(k, -1).values
        probability = (values - total).exp()
        before = probability.cumsum(-1) - probability
        enough = (before[:, -1:] + probability[:, -1:] >= wanted) | (wanted >= 1.0)
        if enough.all() or k == size:
            break
    last = (before < wanted).sum(-1, keepdim=True).clamp_min_(1) - 1
    return torch.where(wanted >= 1.0, -torch.inf, values.gather(1, last))
