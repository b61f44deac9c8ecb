"""Recurrent states of sequences in memory, and moving them.

Owns: the state tensors. Never touches: whose a row is, how a state advances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from palestra.model.loading.spec import ModelSpec
from palestra.model.sampling.sequences import StateMove


class RecurrentStates:
    """For each layer with a recurrence: matrices in float32, and the last inputs of its convolution."""

    def __init__(self, spec: ModelSpec, n_rows: int, *, dtype: torch.dtype, device: torch.device):
        self.spec, self.device, self.dtype = spec, device, dtype
        self.matrices: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self._stacks: list[Tensor] = []
        """The same by kind, [layers, rows, …]: a row of all layers is copied at once."""
        for kind in dict.fromkeys(spec.recurrences.values()):
            layers = [n for n, recurrence in spec.recurrences.items() if recurrence == kind]
            matrices = torch.zeros(len(layers), n_rows, *kind.state_shape, device=device)
            inputs = torch.zeros(len(layers), n_rows, *kind.conv_state_shape, dtype=dtype, device=device)
            self.matrices.update(zip(layers, matrices, strict=True))
            self.inputs.update(zip(layers, inputs, strict=True))
            self._stacks += [matrices, inputs]

    def move(self, moves: Iterable[StateMove]) -> None:
        """Moves states in their order: a target may be a later source."""
        for source, target in moves:
            for rows in self._stacks:
                if source is None:
                    rows[:, target].zero_()
                else:
                    rows[:, target].copy_(rows[:, source])

    def save(self, snapshots: Mapping[int, int]) -> None:
        self.move(snapshots.items())
