"""Weights that were quantised before, kept on disk: the next start reads them instead of the whole model.

Each weight has a file of its own with a checksum; one that is missing or damaged is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from palestra.model.errors import WeightsError
from palestra.model.loading.safetensors_file import SafetensorsFile
from palestra.model.quantised.forms import Form
from palestra.util.atomic_files import replacing

log = logging.getLogger(__name__)

FORMAT = 1
MIN_BYTES = 1 << 28  # smaller models are quantised in less time than it takes to notice
CHECKSUM = "crc32"


class QuantisedCache:
    def __init__(self, folder: Path):
        self.folder, self.found, self._is_full = folder, 0, False

    @classmethod
    def of(cls, files: list[Path], form: Form) -> QuantisedCache | None:
        """Returns the cache for these weight files as they are now; None for small models."""
        facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        if sum(size for _, size, _ in facts) < MIN_BYTES:
            return None
        key = hashlib.sha256(json.dumps([FORMAT, form.name, form.group, sorted(facts)]).encode()).hexdigest()
        return cls(cache_folder() / f"{form.name}-{key[:32]}")

    def get(self, number: int, shapes: tuple[torch.Size, torch.Size], code_type: torch.dtype) -> list[Tensor] | None:
        """Codes and scales of the weight that is read as the number-th; None where they are not kept, or damaged."""
        file = self._file(number)
        if not file.is_file():
            return None
        try:
            shard = SafetensorsFile(file)
            try:
                found = [shard.read(name) for name in ("codes", "scales")]
            finally:
                shard.close()
        except (WeightsError, KeyError) as e:
            log.warning("quantised_cache_damaged file=%s error=%s", file, e)
            return None
        fits = tuple(t.shape for t in found) == shapes and [t.dtype for t in found] == [code_type, torch.float32]
        if not fits or shard.metadata.get(CHECKSUM) != _checksum(found):
            log.warning("quantised_cache_damaged file=%s error=its content is not what was written", file)
            return None
        self.found += 1
        return found

    def put(self, number: int, codes: Tensor, scales: Tensor) -> None:
        """A disk without room ends the caching, not the load."""
        if self._is_full:
            return
        tensors = {"codes": codes.cpu(), "scales": scales.cpu()}
        try:
            with replacing(self._file(number)) as stream:
                stream.write(save(tensors, metadata={CHECKSUM: _checksum(list(tensors.values()))}))
        except OSError as e:
            self._is_full = True
            log.warning("quantised_cache_not_written folder=%s error=%s", self.folder, e)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palestra" / "quantised"


def _checksum(tensors: list[Tensor]) -> str:
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
