"""Kept activations wait in the host's memory until the backward pass comes to them.

Of each layer that is computed again in the backward pass, its input is kept. Here it is copied to pinned memory on a
stream of its own while the next layers compute; while the backward pass computes a layer, the input of the layer before
it comes back. Numbers are copied, so gradients have the same bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

LEAST_BYTES = 1 << 20
"""Smaller tensors stay where they are."""
AHEAD = 1
"""Tensors that come back before they are asked for."""


@dataclass(slots=True, eq=False)
class _Parked:
    number: int
    host: Tensor
    on_device: Tensor | None
    """Until it is copied, and from the time that it is on its way back."""
    is_there: torch.Event | None = None
    """The end of the last copy."""


class ActivationOffload:
    """Of one micro-batch. On a CPU, where there is no other memory, tensors are copied within it.

    What is on the device is allocated and released in the order of the computing stream alone, so that the host, which
    is far ahead of the device, never holds more of it than is in use."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._parked: list[_Parked] = []

    def keeping(self) -> AbstractContextManager[object]:
        """Inside, large tensors that autograd keeps are offloaded."""
        return saved_tensors_hooks(self._park, self._fetch)

    def close(self) -> None:
        """Ends the pass, whole or broken off: the device waits for copies that are under way, which would otherwise be
        written into memory that it has given to someone else."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for parked in self._parked:
            parked.on_device = None
        self._parked.clear()

    def _park(self, x: Tensor) -> Tensor | _Parked:
        if x.nbytes < LEAST_BYTES or x.device != self._device or not x.is_floating_point():
            return x
        if self._parked:
            self._wait_for(earlier := self._parked[-1])
            earlier.on_device = None
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=self._stream is not None)
        self._parked.append(parked := _Parked(len(self._parked), host, x))
        self._copy(parked, host, x)
        return parked

    def _fetch(self, kept: Tensor | _Parked) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        for parked in reversed(self._parked[max(0, kept.number - AHEAD) : kept.number + 1]):
            if parked.on_device is None:
                parked.on_device = torch.empty_like(parked.host, device=self._device)
                self._copy(parked, parked.on_device, parked.host)
        self._wait_for(kept)
        x, kept.on_device = kept.on_device, None
        assert x is not None
        return x

    def _copy(self, parked: _Parked, target: Tensor, source: Tensor) -> None:
        """Begins when the device has done what it was asked for until now."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            parked.is_there = self._stream.record_event()

    def _wait_for(self, parked: _Parked) -> None:
        if parked.is_there is not None:
            torch.cuda.current_stream(self._device).wait_event(parked.is_there)
