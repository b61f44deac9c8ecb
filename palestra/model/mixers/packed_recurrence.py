"""The recurrence over packed sequences that all begin here: what training uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from palestra.model import kernels
from palestra.model.attention.branches import Branches
from palestra.model.loading.layer_spec import DeltaNetSpec, RecurrenceSpec
from palestra.model.loading.spec import ModelSpec
from palestra.model.mixers.causal_conv import ConvLayout, causal_conv
from palestra.model.mixers.chunked_scan import ChunkLayout
from palestra.model.mixers.delta_rule import delta_rule
from palestra.model.mixers.inputs import Recurrence
from palestra.model.mixers.state_space import state_space
from palestra.model.shared_rows import SpreadRows


class PackedRecurrence:
    """States and convolutions of every sequence start at zero."""

    def __init__(self, lengths: Sequence[int], spec: ModelSpec, device: torch.device | str):
        self.layers = spec.recurrences
        self.chunks = ChunkLayout(lengths, device)
        kernels = {layer.conv_kernel for layer in self.layers.values()}
        self.convs = {kernel: ConvLayout(lengths, kernel - 1, device) for kernel in kernels}

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return causal_conv(x, weight, self.convs[self.layers[layer].conv_kernel], bias=bias)[0]

    def scan(self, layer: int, x: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return scan_chunks(x, beta, decay, self.chunks, self.layers[layer])[0]


class SharedRecurrence:
    """The recurrence over sequences that share rows. States are each sequence's own, from its first token on: a
    recurrence is a small part of a layer's work, and its chunks lie on a grid that no branch need meet."""

    def __init__(self, within: Recurrence, branches: Branches, device: torch.device | str):
        """`within`: of the sequences without sharing."""
        self._within, self._rows = within, SpreadRows(branches.paths, device)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._rows.pick(self._within.convolve(layer, self._rows.spread(x), weight, bias))

    def scan(self, layer: int, x: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        spread = (self._rows.spread(one) for one in (x, beta, decay))
        return self._rows.pick(self._within.scan(layer, *spread))


def scan_chunks(
    x: Tensor, beta: Tensor, decay: Tensor, layout: ChunkLayout, spec: RecurrenceSpec, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A layer's recurrence in chunks; see `chunked_scan`."""
    if isinstance(spec, DeltaNetSpec):
        return delta_rule(x, beta, decay, layout, spec, state)
    return state_space(x, beta, decay, layout, spec, state)


def packed_recurrence(
    lengths: Sequence[int],
    spec: ModelSpec,
    device: torch.device | str,
    dtype: torch.dtype,
    branches: Branches | None = None,
) -> Recurrence | None:
    """Returns the recurrence by kernels on a GPU in half precision, by torch elsewhere. None for models that have no
    recurrence. `branches`: sequences that share rows."""
    if not spec.recurrences:
        return None
    if branches is not None:
        within = packed_recurrence(branches.sequence_lengths, spec, device, dtype)
        assert within is not None
        return SharedRecurrence(within, branches, device)
    if kernels.can_run(device, dtype):
        from palestra.model.mixers.kernel_recurrence import PackedKernelRecurrence

        return PackedKernelRecurrence(lengths, spec.recurrences, device)
    return PackedRecurrence(lengths, spec, device)
