"""Copies between host and device that the host does not wait for.

On a GPU, what the host sends lies in pinned memory (torch keeps it until the copy is done), and what comes back is
waited for when it is read. Elsewhere both are plain copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor


def to_device(values: Sequence[object] | NDArray, device: torch.device | str, dtype: DTypeLike | None = None) -> Tensor:
    """A tensor of these values, in stream order."""
    host = torch.from_numpy(np.array(values, dtype))
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class StagedBuffer:
    """Bytes that are written on the host and sent to the device, over and over."""

    def __init__(self, size: int, device: torch.device):
        host, is_cuda = torch.zeros(size, dtype=torch.uint8), device.type == "cuda"
        self.host = host.pin_memory() if is_cuda else host
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._sent = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        """Waits before the host writes: what was sent last may still be read."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, size: int | None = None) -> None:
        """The first `size` bytes, in stream order."""
        self.device[:size].copy_(self.host[:size], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class Readback:
    """Tensors on their way to the host."""

    def __init__(self, *tensors: Tensor):
        self._host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._done: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> list[Tensor]:
        """Waits for what was asked of the device before the copies, not for what came after them."""
        if self._done is not None:
            self._done.synchronize()
        return self._host
