"""One safetensors file, read straight into the memory where its tensors will stay.

Mapped into memory, a file would count beside what is made of it, and come in small pieces.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from io import FileIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from palestra.model.errors import WeightsError

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
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


class SafetensorsFile:
    def __init__(self, path: Path):
        """Raises WeightsError where the header tells that the file is not complete."""
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
            self.metadata, self.tensors = _read_header(self._file, path.stat().st_size)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise WeightsError(f"{path}: not a complete safetensors file ({e}); download it again") from None

    def close(self) -> None:
        self._file.close()

    def read_into(self, name: str, place: Tensor, *, first: int = 0) -> None:
        """Fills a contiguous tensor of the same shape, or with the numbers from `first` on; in parts where type or
        device differ."""
        stored = self.tensors[name]
        assert isinstance(stored.dtype, torch.dtype)
        start = stored.start + first * stored.dtype.itemsize
        if place.device.type == "cpu" and place.dtype == stored.dtype:
            self._fill(place, start)
            return
        flat, step = place.view(-1), CHUNK_BYTES // stored.dtype.itemsize
        for done in range(0, flat.numel(), step):
            part = flat[done : done + step]
            staged = _staging(place.device.type).view(stored.dtype)[: part.numel()]
            self._fill(staged, start + done * stored.dtype.itemsize)
            part.copy_(staged)

    def read_columns(self, name: str, first: int, place: Tensor) -> None:
        """Fills [rows, n] with n columns from `first` on, of a matrix or a stack of them."""
        stored, (rows, n) = self.tensors[name], place.shape
        assert isinstance(stored.dtype, torch.dtype)
        size, width = stored.dtype.itemsize, stored.shape[-1]
        step = max(1, CHUNK_BYTES // (n * size))
        for done in range(0, rows, step):
            part = place[done : done + step]
            staged = _staging(place.device.type).view(stored.dtype)[: part.numel()].view(part.shape)
            for row, target in enumerate(staged, start=done):
                self._fill(target, stored.start + (row * width + first) * size)
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


def _read_header(file: FileIO, size: int) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Metadata and tensors. Raises ValueError where they do not fill the file."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError("its header is cut off")
    header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    tensors = {name: _stored(entry, 8 + length) for name, entry in header.items()}
    if (end := max((t.start + t.size_bytes for t in tensors.values()), default=8 + length)) != size:
        raise ValueError(f"it has {size} bytes, its header names {end}")
    return metadata, tensors


def _stored(entry: dict, data_start: int) -> StoredTensor:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    name: str = entry["dtype"]
    dtype = TYPES.get(name, name)
    if isinstance(dtype, torch.dtype) and end - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of {name} {list(shape)} has {end - start} bytes")
    return StoredTensor(shape, dtype, data_start + start, end - start)


@cache
def _staging(kind: str) -> Tensor:
    """Memory that a GPU can copy from at full speed."""
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=kind == "cuda")
