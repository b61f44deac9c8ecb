"""What the layers of a forward pass share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from palestra.model.attention.packed import Attention
from palestra.model.attention.rope import Angles
from palestra.model.mlp.routing import Routing


class Recurrence(Protocol):
    """What delta nets call in each layer, with the sequences of a batch packed in one row dimension."""

    def __call__(self, layer: int, qkv: Tensor, beta: Tensor, decay: Tensor, conv: Tensor) -> Tensor:
        """Convolution and delta rule: [tokens, value heads, value dim], float32. `qkv` as projected, `conv` the
        convolution's weights, `beta` and `decay` (in log space) [tokens, value heads]."""
        ...


@dataclass(frozen=True, slots=True)
class MixerInputs:
    angles: dict[str, Angles]
    """By the rope's name in `ModelSpec.ropes`."""
    attend: Attention
    recur: Recurrence | None
    """None for models without a recurrence."""
    routing: Routing | None = None
    """Where it is noted which experts the rows visit, if somebody wants to know."""
