"""Rules that change the distribution of a token: masks, penalties, bias, then top-k, top-p and min-p.

Of logits [rows, vocabulary], each rule changes the rows that ask for it; the others keep their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from palestra.model import kernels
from palestra.model.transfers import to_device
from palestra.types import SamplingParams

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

    @property
    def is_unripe(self) -> bool:
        """Whether it is too early for a stop token."""
        return len(self.generated) < self.params.min_tokens and bool(self.stop_ids)


def shape_logits(logits: Tensor, rows: Sequence[DrawRow]) -> Tensor:
    """Logits after masks, penalties, bias and unripe stop tokens: a changed copy, or the same where there are none."""
    changed = _masked(logits, rows)
    for i, row in enumerate(rows):
        p = row.params
        if not _has_penalty(p) and not p.logit_bias and not row.is_unripe:
            continue
        changed = logits.clone() if changed is None else changed
        if _has_penalty(p):
            _penalise(changed[i], row)
        if p.logit_bias:
            ids = to_device(list(p.logit_bias), logits.device, np.int64)
            changed[i].index_add_(0, ids, _column(logits, list(p.logit_bias.values())).squeeze(1))
        if row.is_unripe and _something_else_is_left(row):
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


def filter_logits(scaled: Tensor, rows: Sequence[DrawRow]) -> Tensor:
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


def _has_filter(p: SamplingParams) -> bool:
    return p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)


def _has_penalty(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or bool(p.presence_penalty) or bool(p.frequency_penalty)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return to_device(values, like.device, np.float32).to(like.dtype)[:, None]
