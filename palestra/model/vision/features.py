"""What the text model gets of a picture, and what computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from palestra.model.loading.tower_spec import CHANNELS
from palestra.types import Picture


@dataclass(frozen=True, slots=True)
class Features:
    rows: Tensor
    """[positions, hidden]: these stand where tokens have their embeddings."""
    deepstack: tuple[Tensor, ...] = ()
    """The same shape each: added behind the text model's first layers."""

    @property
    def size_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.rows, *self.deepstack))


def pixels_of(picture: Picture, device: torch.device) -> Tensor:
    """[height, width, channels], numbers from 0 to 255 in float32."""
    pixels = np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, CHANNELS)
    return torch.from_numpy(pixels.copy()).to(device, torch.float32)


class Tower(Protocol):
    """A frozen vision tower. It reads one picture at a time, so that a picture's features depend on nothing else."""

    def __call__(self, picture: Picture) -> Features: ...
