"""One tensor of a random model: its name and shape, and what kind of numbers it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["embedding", "projection", "norm", "offset_norm", "small_norm", "bias", "conv", "kernel", "log_decay"]


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    kind: Kind
