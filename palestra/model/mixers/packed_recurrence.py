"""The recurrence over packed sequences that all begin here: what training uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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


def packed_recurrence(lengths: Sequence[int], spec: ModelSpec, device: torch.device | str) -> Recurrence | None:
    """None for models that have none."""
    return PackedRecurrence(lengths, spec, device) if spec.delta_nets else None
