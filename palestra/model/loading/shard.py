"""One safetensors file, read straight into the memory where its tensors will stay.

Mapped into memory, a file would count beside what is made of it, and come in small pieces. Owns: the layout of one
file, reading it fast. Never touches: several files, what tensors mean.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from palestra.model.errors import WeightsError

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Types of tensors by their names in headers; of those that may be in such files, the common ones."""
CHUNK_BYTES = 1 << 25  # read at once where numbers are converted or moved: 32 MiB
READ_AHEAD_BYTES = 1 << 27  # asked of the disk while a chunk is converted


@dataclass(frozen=True, slots=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    """A name where it is none of the common ones."""
    start: int
    """First byte in the file."""
    size_bytes: int


class Shard:
    def __init__(self, path: Path):
        """Raises WeightsError where the header tells that the file is not complete."""
        self.path = path
        try:
            with safe_open(str(path), framework="pt"):
                pass  # it checks that header and size fit each other
            self._file = path.open("rb", buffering=0)
        except (SafetensorError, OSError) as e:
            raise WeightsError(f"{path}: not a complete safetensors file ({e}); download it again") from None
        length = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(length))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.tensors = {name: _stored(entry, 8 + length) for name, entry in header.items()}

    def close(self) -> None:
        self._file.close()

    def read_into(self, name: str, place: Tensor) -> None:
        """Fills a contiguous tensor of the same shape; in parts where type or device differ."""
        stored = self.tensors[name]
        assert isinstance(stored.dtype, torch.dtype)
        if place.device.type == "cpu" and place.dtype == stored.dtype:
            self._fill(place, stored.start)
            return
        flat, step = place.view(-1), CHUNK_BYTES // stored.dtype.itemsize
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            staged = _staging(place.device.type).view(stored.dtype)[: part.numel()]
            self._fill(staged, stored.start + first * stored.dtype.itemsize)
            part.copy_(staged)

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored, on the CPU."""
        stored = self.tensors[name]
        assert isinstance(stored.dtype, torch.dtype)
        place = torch.empty(stored.shape, dtype=stored.dtype)
        self._fill(place, stored.start)
        return place

    def _fill(self, place: Tensor, start: int) -> None:
        memory = place.view(-1).view(torch.uint8).numpy().data
        if hasattr(os, "posix_fadvise"):  # not so on a Mac
            os.posix_fadvise(self._file.fileno(), start + len(memory), READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        self._file.seek(start)
        done = 0
        while done < len(memory):
            count = self._file.readinto(memory[done:])
            if not count:
                raise WeightsError(f"{self.path}: became shorter while it was read; download it again")
            done += count


def _stored(entry: dict, data_start: int) -> StoredTensor:
    dtype: str = entry["dtype"]
    start, end = entry["data_offsets"]
    return StoredTensor(tuple(entry["shape"]), TYPES.get(dtype, dtype), data_start + start, end - start)


@cache
def _staging(kind: str) -> Tensor:
    """Memory that a GPU can copy from at full speed."""
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=kind == "cuda")
