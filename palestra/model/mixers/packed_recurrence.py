"""The recurrence over packed sequences that all begin here: what training uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from palestra.model import kernels
from palestra.model.loading.spec import ModelSpec
from palestra.model.mixers.delta_rule import ChunkLayout, ConvLayout, causal_conv, delta_rule
from palestra.model.mixers.inputs import Recurrence


class PackedRecurrence:
    """States and convolutions of every sequence start at zero."""

    def __init__(self, lengths: Sequence[int], spec: ModelSpec, device: torch.device | str):
        self.delta_nets = spec.delta_nets
        self.chunks = ChunkLayout(lengths, device)
        kernels = {d.conv_kernel for d in self.delta_nets.values()}
        self.convs = {kernel: ConvLayout(lengths, kernel - 1, device) for kernel in kernels}

    def __call__(self, layer: int, qkv: Tensor, beta: Tensor, decay: Tensor, conv: Tensor) -> Tensor:
        spec = self.delta_nets[layer]
        mixed, _ = causal_conv(qkv, conv, self.convs[spec.conv_kernel])
        return delta_rule(mixed, beta, decay, self.chunks, spec)[0]


def packed_recurrence(
    lengths: Sequence[int], spec: ModelSpec, device: torch.device | str, dtype: torch.dtype
) -> Recurrence | None:
    """By kernels on a GPU in half precision, by torch elsewhere. None for models that have no recurrence."""
    if not spec.delta_nets:
        return None
    if kernels.can_run(device, dtype):
        from palestra.model.mixers.kernel_recurrence import PackedKernelRecurrence

        return PackedKernelRecurrence(lengths, spec.delta_nets, device)
    return PackedRecurrence(lengths, spec, device)
