"""Attention and recurrences over rows of which each process has a part: see `context_group`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from palestra.model.attention.packed import Attention
from palestra.model.loading.layer_spec import DeltaNetSpec, RecurrenceSpec
from palestra.model.mixers.inputs import Recurrence

if TYPE_CHECKING:
    from palestra.model.context_group import ContextRows


class ContextAttention:
    """See `Attention`: queries, keys and values are of this process's rows, and so is the result."""

    def __init__(self, within: Attention, rows: ContextRows):
        """`within`: over all rows, with this process's part of the heads."""
        self._within, self._rows = within, rows

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        rows = self._rows
        own_k = None if k is None else rows.to_heads(k)
        own_v = own_k if v is None or v is k else rows.to_heads(v)  # compressed rows are both
        own_sinks = None if sinks is None else sinks[rows.shard.own(len(sinks))]
        mixed = self._within(layer, rows.to_heads(q), own_k, own_v, own_sinks)
        return rows.to_rows(mixed.unflatten(1, (q.shape[1] // rows.group.ranks, -1))).flatten(1)


class ContextRecurrence:
    """See `Recurrence`: what comes in and goes out is of this process's rows."""

    def __init__(self, within: Recurrence, rows: ContextRows, layers: Mapping[int, RecurrenceSpec]):
        """`within`: over all rows, with this process's part of the heads; `layers` have all heads."""
        self._within, self._rows, self._layers = within, rows, layers

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        own_weight, own_bias = (None if w is None else self._own_channels(layer, w) for w in (weight, bias))
        assert own_weight is not None
        mixed = self._within.convolve(layer, self._channels_to_heads(layer, x), own_weight, own_bias)
        parts = self._rows.to_rows(mixed[:, None]).split(self._sizes(layer, self._rows.group.ranks), -1)
        return torch.cat([part.flatten(1) for part in parts], 1)

    def scan(self, layer: int, x: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        gates = (self._rows.to_heads(one[..., None])[..., 0] for one in (beta, decay))
        return self._rows.to_rows(self._within.scan(layer, self._channels_to_heads(layer, x), *gates))

    def _channels_to_heads(self, layer: int, x: Tensor) -> Tensor:
        """[own rows, channels] to [rows, own channels]."""
        return self._rows.to_heads(self._by_rank(layer, x))[:, 0]

    def _own_channels(self, layer: int, x: Tensor) -> Tensor:
        return self._by_rank(layer, x)[..., self._rows.group.rank, :].contiguous()

    def _by_rank(self, layer: int, x: Tensor) -> Tensor:
        """[…, channels] to […, ranks, channels of a rank]: its part of each of what stands beside each other there."""
        ranks = self._rows.group.ranks
        return torch.cat([part.unflatten(-1, (ranks, -1)) for part in x.split(self._sizes(layer), -1)], -1)

    def _sizes(self, layer: int, ranks: int = 1) -> list[int]:
        """Channels of queries, keys and values, or of x, B and C: of all of so many ranks."""
        spec = self._layers[layer]
        if isinstance(spec, DeltaNetSpec):
            sizes = (spec.key_size, spec.key_size, spec.value_size)
        else:
            shared = spec.n_groups * spec.state_size
            sizes = (spec.inner_size, shared, shared)
        return [size // ranks for size in sizes]
