"""Activations between the two linear layers of a feed-forward network."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import gelu

from palestra.model.block_ops import BlockOps, SwiGlu
from palestra.model.loading.layer_spec import Activation


def activation(name: Activation, ops: BlockOps) -> SwiGlu:
    return {"silu": ops.swiglu, "gelu_tanh": gelu_tanh, "relu2": relu_squared}[name]


def relu_squared(up: Tensor) -> Tensor:
    return up.relu().square()


def gelu_tanh(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of a fused [tokens, 2 * intermediate], gelu by its approximation with tanh."""
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate, approximate="tanh") * up
