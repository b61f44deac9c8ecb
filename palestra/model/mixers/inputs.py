"""Inputs that the layers of a forward pass share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from palestra.model.attention.packed import Attention
from palestra.model.attention.rope import Angles
from palestra.model.mlp.routing import Routing
from palestra.model.vision.placed import PictureRows


class Recurrence(Protocol):
    """What layers with a recurrent state call, with the sequences of a batch packed in one row dimension."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """silu of the causal convolution of what was projected, [tokens, channels]."""
        ...

    def scan(self, layer: int, x: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """The recurrence over what was convolved: [tokens, heads, dim], float32. `beta` (how much of a position enters
        the state) and `decay` (in log space) are [tokens, heads]."""
        ...


@dataclass(frozen=True, slots=True)
class MixerInputs:
    angles: dict[str, Angles]
    """By the rope's name in `ModelSpec.ropes`."""
    attend: Attention
    recur: Recurrence | None
    """None for models without a recurrence."""
    routing: Routing | None = None
    """Records which experts the rows visit, if they are recorded."""
    per_layer: Tensor | None = None
    """[tokens, layers, width]: inputs of each layer's own, in models that have some."""
    pictures: PictureRows | None = None
    """What the batch has of pictures; None: all rows are text."""
