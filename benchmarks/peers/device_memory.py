"""What a process takes of a device's memory, and a limit on it."""

from __future__ import annotations

import gc
import resource

import torch


class DeviceMemory:
    """Memory that this process takes on the device from now on; on a GPU it can take no more than a limit."""

    def __init__(self, device: torch.device, limit_bytes: int | None = None):
        self.device = device
        if device.type == "cuda":
            gc.collect()  # a sampler's graphs and the case before are in circles
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            free, total = torch.cuda.mem_get_info()
            self._outside = total - free - torch.cuda.memory_reserved()
            if limit_bytes is not None:
                torch.cuda.set_per_process_memory_fraction((limit_bytes - self._outside) / total)
        else:
            self._outside = _resident_peak()

    def peak_bytes(self) -> int:
        """With CUDA's own share, its libraries and kernels."""
        if self.device.type != "cuda":
            return _resident_peak() - self._outside
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        return torch.cuda.max_memory_reserved() + outside

    def lift(self) -> None:
        """Ends the limit."""
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
