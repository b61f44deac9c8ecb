"""The recurrence over packed sequences by kernels: for half precision on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.kernels.causal_conv import causal_conv
from palestra.model.kernels.chunk_products import Spans
from palestra.model.kernels.delta_rule import delta_rule
from palestra.model.kernels.state_space import state_space
from palestra.model.loading.layer_spec import DeltaNetSpec, RecurrenceSpec
from palestra.model.mixers.chunked_scan import CHUNK
from palestra.model.transfers import to_device


@dataclass(frozen=True, slots=True)
class SpanArrays:
    """Packed spans of sequences on the host, int32: see `causal_conv` for `rows`, and `Spans` for the others."""

    rows: NDArray[np.int32]
    table: NDArray[np.int32]

    @classmethod
    def of(cls, lengths: Sequence[int], slots: Sequence[int]) -> SpanArrays:
        """Spans that stand end to end."""
        counts, places = np.array(lengths, np.int32), np.array(slots, np.int32)
        starts = np.cumsum(counts, dtype=np.int32) - counts
        offsets = np.arange(counts.sum(), dtype=np.int32) - np.repeat(starts, counts)
        rows = np.stack([offsets, np.repeat(counts - 1, counts) - offsets, np.repeat(places, counts)], 1)
        n_chunks = -(-counts // CHUNK)
        return cls(rows, np.stack([starts, counts, np.cumsum(n_chunks) - n_chunks, places], 1).astype(np.int32))

    @property
    def chunks(self) -> NDArray[np.int32]:
        found = [
            (first + start, min(CHUNK, count - start))
            for first, count, _, _ in self.table.tolist()
            for start in range(0, count, CHUNK)
        ]
        return np.array(found, np.int32).reshape(-1, 2)


class PackedKernelRecurrence:
    """Sequences that all begin here, with gradients; see `Recurrence`."""

    def __init__(self, lengths: Sequence[int], layers: Mapping[int, RecurrenceSpec], device: torch.device | str):
        self.layers = layers
        arrays = SpanArrays.of(lengths, [-1] * len(lengths))
        self.rows, table, chunks = (to_device(a, device) for a in (arrays.rows, arrays.table, arrays.chunks))
        self.spans = Spans(table, chunks)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return causal_conv(x, weight, self.rows, bias=bias)

    def scan(self, layer: int, x: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        spec = self.layers[layer]
        if isinstance(spec, DeltaNetSpec):
            return delta_rule(x, beta, decay, self.spans, spec)
        return state_space(x, beta, decay, self.spans, spec)
