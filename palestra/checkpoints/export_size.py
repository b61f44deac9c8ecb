"""Estimates the disk space of an exported model from the headers of its base's files."""

from __future__ import annotations

from math import prod
from pathlib import Path

from palestra.model.loading.weight_files import HEADS, WeightFiles
from palestra.model.lora.packed_export import NF4, is_packed
from palestra.runs.export_form import ExportDtype, GgufQuant

_PLAIN_BITS = 16.0  # also of weights that the base keeps in 4 or 8 bits
_DTYPE_BITS: dict[ExportDtype, float] = {"float32": 32.0, "fp8": 8.0, "nf4": 4.0 + 32 / NF4.group}
_QUANT_BITS: dict[GgufQuant, float] = {"f32": 32, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5}
_QUANT_BITS["mxfp4"] = _QUANT_BITS["q8_0"]  # most: experts take half of it
_QUANT_GROUP = 32


def model_bytes(base: Path, dtype: ExportDtype | None, quant: GgufQuant | None, *, is_untied: bool) -> int:
    """Returns about how many bytes a whole model takes in this dtype or form; None: as its base is stored.
    `is_untied`: the unembedding gets a matrix of its own. Raises WeightsError."""
    with WeightFiles(base) as files:
        sizes = {name: prod(files.shape(name)) * _bits(files, name, dtype, quant) for name in files}
        copied = sizes[files.embedding] if is_untied and not any(head in files for head in HEADS) else 0
        return int(sum(sizes.values()) + copied) // 8


def _bits(files: WeightFiles, name: str, dtype: ExportDtype | None, quant: GgufQuant | None) -> float:
    """Bits that each number of a weight takes."""
    shape, stored = files.shape(name), files.dtype(name)
    as_stored = _PLAIN_BITS if stored is None else stored.itemsize * 8.0
    if quant is not None:
        plain = _QUANT_BITS["f32"] if len(shape) == 1 else _PLAIN_BITS
        return _QUANT_BITS.get(quant, plain) if shape and shape[-1] % _QUANT_GROUP == 0 else plain
    if dtype in ("fp8", "nf4"):
        return _DTYPE_BITS[dtype] if is_packed(name, shape, files.prefix, dtype) else min(as_stored, _PLAIN_BITS)
    return as_stored if dtype is None else _DTYPE_BITS.get(dtype, _PLAIN_BITS)
