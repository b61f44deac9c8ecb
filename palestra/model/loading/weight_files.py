"""Safetensors files of a model folder as one mapping of names.

Owns: shards, their index, and what can be wrong with them. Never touches: what the names mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from palestra.model.errors import WeightsError

PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""What the names of the text model's tensors begin with, by who wraps it."""


class WeightFiles:
    """The shards of one folder as a single mapping of names; opens each file once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: dict[str, safe_open] = {}
        self.file_of = _index(folder)

    def __enter__(self) -> WeightFiles:
        for file in dict.fromkeys(self.file_of.values()):
            self._handle(file)
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    @property
    def prefix(self) -> str:
        """What the names of the decoder's tensors begin with."""
        return next((p for p in PREFIXES if f"{p}embed_tokens.weight" in self.file_of), PREFIXES[0])

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        file = self.file_of.get(name)
        if file is None:
            raise WeightsError(
                f"{self.folder}: no tensor named {name!r} in the safetensors files; the config asks for it"
            )
        try:
            found = self._handle(file).get_tensor(name)
        except SafetensorError as e:
            raise WeightsError(f"{self.folder / file}: tensor {name!r} cannot be read ({e})") from None
        if shape is not None and tuple(found.shape) != shape:
            raise WeightsError(
                f"{self.folder / file}: tensor {name!r} has shape {list(found.shape)}, "
                f"config.json asks for {list(shape)}"
            )
        if not found.is_floating_point():
            raise WeightsError(
                f"{self.folder / file}: tensor {name!r} has dtype {found.dtype}; supported: floating-point weights"
            )
        return found

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise WeightsError(f"{path}: this shard is missing, but the index names it; download it again")
            try:
                self._open[file] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as e:
                raise WeightsError(f"{path}: not a complete safetensors file ({e}); download it again") from None
        return self._open[file]


def _index(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise WeightsError(f"{index}: not a valid shard index ({e!r})") from None
    single = folder / "model.safetensors"
    if not single.is_file():
        raise WeightsError(
            f"{folder}: no model.safetensors and no model.safetensors.index.json; "
            "only safetensors weights are supported"
        )
    try:
        with safe_open(str(single), framework="pt") as f:
            return dict.fromkeys(f.keys(), single.name)
    except (SafetensorError, OSError) as e:
        raise WeightsError(f"{single}: not a complete safetensors file ({e}); download it again") from None
