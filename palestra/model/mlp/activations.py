"""What happens between the two products of a feed-forward network."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu

from palestra.model.block_ops import BlockOps, SwiGlu
from palestra.model.loading.layer_spec import Activation


def activation(name: Activation, ops: BlockOps) -> SwiGlu:
    return ops.swiglu if name == "silu" else gelu_tanh


def gelu_tanh(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of a fused [tokens, 2 * intermediate], gelu by its approximation with tanh."""
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate, approximate="tanh") * up
