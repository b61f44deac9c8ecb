"""The causal convolution before a recurrence: each channel sees the last few inputs of its own sequence.

y[t, c] = silu(bias[c] + sum over j < kernel of weight[j, c] x[t - (kernel - 1) + j, c]), with zeros or the kept state
before a sequence. Packed rows are laid out with kernel - 1 rows of history before each sequence; then the sum over j is
one of shifted copies of all rows, and what it mixes across sequences is in rows that are not read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from palestra.model.transfers import to_device


class ConvLayout:
    """Packed sequences with a few rows of history before each of them."""

    def __init__(self, lengths: Sequence[int], history: int, device: torch.device | str):
        self.history, self.size = history, sum(lengths) + history * len(lengths)
        begins = np.cumsum([0, *(n + history for n in lengths)])
        rows = [np.arange(begin + history, begin + history + n) for begin, n in zip(begins, lengths, strict=False)]
        self.place = to_device(np.concatenate(rows), device)
        self.before = to_device((begins[:-1, None] + np.arange(history)).ravel(), device)
        self.after = to_device((begins[1:, None] - history + np.arange(history)).ravel(), device)


def causal_conv(
    x: Tensor, weight: Tensor, layout: ConvLayout, state: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """silu of the causal convolution of each channel, and the inputs the next positions will see, [n, history,
    channels]. `weight`: [kernel, channels]; `state`: inputs before the first rows, zero by default."""
    rows = x.new_zeros(layout.size, x.shape[1], dtype=torch.float32)
    if state is not None:
        rows.index_copy_(0, layout.before, state.flatten(0, 1).float())
    rows = rows.index_copy(0, layout.place, x.float())
    n = layout.size - layout.history
    mixed = sum((rows[j : j + n] * weight[j] for j in range(1, len(weight))), rows[:n] * weight[0])
    out = mixed.index_select(0, layout.place - layout.history)
    out = out if bias is None else out + bias
    after = rows.detach().index_select(0, layout.after).unflatten(0, (-1, layout.history))
    return silu(out).to(x.dtype), after.to(x.dtype)
