"""The base model with an adapter folded in, as a plain Hugging Face folder in the layout of the base.

W [out, in] becomes W + scale * B A, in float32, with B [out, rank] and A [rank, in]. Where the base keeps several of
our projections in one matrix, their B A stand under each other; of experts, B A is [experts, out, in], and an A or B
that they share counts for each of them.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from palestra.model.errors import AdapterError, UnsupportedModel
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weight_files import HEADS, PREFIXES, WeightFiles
from palestra.model.loading.weights import by_turns, lay_out
from palestra.model.lora.adapter_files import adapter_matrices, new_folder
from palestra.model.lora.adapter_names import HEAD, WHOLES, with_tail
from palestra.model.lora.adapters import Adapter
from palestra.model.lora.expert_names import expert_parts
from palestra.model.lora.layout import Layout
from palestra.model.lora.packed_export import ExportPacking, is_packed, packed_parts, packing_config, require_matrices
from palestra.util.atomic_files import whole_folder

log = logging.getLogger(__name__)
SHARD_BYTES = 5 * 10**9
_EXPERTS = re.compile(r"(.*\.experts)(?:\.(\d+))?\.(gate_up_proj|gate_proj|up_proj|down_proj)")


def export_merged(
    adapter: Adapter,
    base: str | Path,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    packing: ExportPacking | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the base model with the adapter folded in; a tied unembedding, if trained, gets a matrix of its own.

    Weights are written as the base stores them, and those that it keeps in 4 or 8 bits in bfloat16, since the sum does
    not fit their form. Given `dtype`, those of the base's most frequent dtype are written in it; the few others, which
    the base keeps apart for their precision, stay. `config.json` names the dtype that most weights have. With `packing`
    linear layers are written in 8 or 4 bits. One file of `shard_bytes` is in memory at a time.
    """
    base = Path(base)
    config = json.loads((base / "config.json").read_text())
    with whole_folder(new_folder(folder)) as temporary, WeightFiles(base) as files:
        weights = MergedWeights(adapter, files, ModelSpec.from_folder(base))
        if weights.is_untied:
            _untie(config)
        shards, kept = _Shards(temporary, shard_bytes), list[str]()
        if packing is not None:
            dtype = dtype or torch.bfloat16
            require_matrices((name, weights.shape(name)) for name in weights.names)
        for name in weights.names:
            stored = weights.stored_dtype(name)
            wanted = dtype if dtype is not None and stored == weights.main_dtype else stored
            weight = weights.tensor(name)
            if packing is not None and is_packed(name, weight.shape, files.prefix, packing):
                for part, numbers in packed_parts(name, weight, packing).items():
                    shards.add(part, numbers)
                continue
            if name.endswith(".weight") and weight.dim() == 2:
                kept.append(name.removesuffix(".weight"))
            shards.add(name, _written(name, weight, wanted))
        weights.require_all_used()
        shards.finish()
        _set_dtype(config, dtype or weights.main_dtype)
        if files.unpacked:
            for level in (config, config.get("text_config") or {}):
                level.pop("quantization_config", None)
            log.info("merged_from_packed folder=%s packed=%s written_as=bfloat16", folder, ",".join(files.unpacked))
        if packing is not None:
            config["quantization_config"] = packing_config(packing, kept)
        for extra in base.iterdir():
            if extra.is_file() and extra.suffix in (".json", ".jinja", ".model", ".txt") and "index" not in extra.name:
                shutil.copy(extra, temporary / extra.name)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _written(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as it is written. Raises UnsupportedModel where the dtype is too narrow for its numbers."""
    written = weight.to(dtype).contiguous()
    if dtype == torch.float16 and written.isinf().any():
        raise UnsupportedModel(f"{name} has numbers that float16 cannot hold; choose --dtype bfloat16 or float32")
    return written


class MergedWeights:
    """The weights of a base model with an adapter folded in, by the names of the base, computed one at a time."""

    def __init__(self, adapter: Adapter, files: WeightFiles, spec: ModelSpec) -> None:
        """Raises ModelError where the files lack a weight, or have one of another shape."""
        lay_out(files, spec, torch.bfloat16, torch.device("meta"))
        self._files, self._matrices, self._layout = files, _Matrices(adapter_matrices(adapter)), adapter.stack.layout
        self.is_untied = spec.tie_embeddings and f"{HEAD}.lora_A.weight" in self._matrices
        """The unembedding was trained, and is from here on another matrix than the embedding."""
        head = files.head
        self._sources = {name: name for name in files if not (self.is_untied and name == head)}  # may hold a copy
        if self.is_untied:
            self._sources[head] = files.embedding
        self.names = list(self._sources)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def require_all_used(self) -> None:
        """Raises AdapterError where the adapter has a matrix that no tensor so far has taken in."""
        if left := sorted(self._matrices.keys() - self._matrices.used):
            raise AdapterError(f"{left[0]} changes no weight of {self._files.folder}; nothing was written")

    @cached_property
    def main_dtype(self) -> torch.dtype:
        """The dtype in which most numbers of the base are written."""
        sizes: Counter[torch.dtype] = Counter()
        for source in set(self._sources.values()):
            sizes[self._files.dtype(source) or torch.bfloat16] += math.prod(self._files.shape(source))
        return sizes.most_common(1)[0][0]

    def stored_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which the base stores it; bfloat16 for what it keeps in 4 or 8 bits."""
        return self._files.dtype(self._sources[name]) or torch.bfloat16

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(self._sources[name])

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor in float32 if the adapter changes it, or else as the files have it."""
        weight = self._files.tensor(self._sources[name])
        change = _change(name, self._files.prefix, self._matrices, self._layout)
        if change is None:
            return weight
        fits = change if change.shape == weight.shape else change.mT  # some files have stacks transposed
        return weight.float() + self._layout.scale * fits


class _Matrices(dict[str, Tensor]):
    """Matrices of an adapter, and which of them were read."""

    def __init__(self, matrices: Mapping[str, Tensor]) -> None:
        super().__init__(matrices)
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.used.add(key)
        return super().__getitem__(key)


class _Shards:
    """Files of about the same size, with an index if there are several."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._tensors and sum(t.nbytes for t in self._tensors.values()) + tensor.nbytes > self._shard_bytes:
            self._write()
        self._tensors[name] = tensor

    def finish(self) -> None:
        """Writes what is left, and gives the files their names, which say how many there are."""
        self._write()
        if len(self._names) == 1:
            self._part(1).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._names, 1):
            file = f"model-{number:05d}-of-{len(self._names):05d}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        self._names.append(list(self._tensors))
        self._total += sum(tensor.nbytes for tensor in self._tensors.values())
        save_file(self._tensors, self._part(len(self._names)), metadata={"format": "pt"})
        self._tensors = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"


def _set_dtype(config: dict[str, Any], dtype: torch.dtype) -> None:
    """Names the dtype wherever the config names one, by the key of its version of transformers."""
    for level in (config, config.get("text_config") or {}):
        for key in {"dtype", "torch_dtype"} & level.keys() or ({"dtype"} if level is config else set()):
            level[key] = str(dtype).removeprefix("torch.")


def _untie(config: dict[str, Any]) -> None:
    """The config says from here on that the embeddings are not tied, also where that was the family's default."""
    for level in (config, config.get("text_config")):
        if level is not None:
            level["tie_word_embeddings"] = False


def _change(name: str, prefix: str, matrices: Mapping[str, Tensor], layout: Layout) -> Tensor | None:
    """Returns what the adapter adds to a tensor of the files, before scaling; None: nothing."""
    module = HEAD if name in HEADS else name.removesuffix(".weight")
    if module.startswith(prefix):
        module = PREFIXES[0] + module.removeprefix(prefix)
    if found := _EXPERTS.fullmatch(module):
        change = _expert_change(found[1], found[2], found[3], matrices, expert_parts(layout))
        if change is None or not layout.is_interleaved:
            return change
        return (by_turns(change) if found[3] == "gate_up_proj" else change).mT
    head, _, leaf = module.rpartition(".")
    parts = [f"{head}.{part}" for part in WHOLES[leaf]] if leaf in WHOLES else [module]
    if f"{parts[0]}.lora_A.weight" not in matrices:
        return None
    change = torch.cat([matrices[f"{p}.lora_B.weight"].cpu() @ matrices[f"{p}.lora_A.weight"].cpu() for p in parts])
    return with_tail(module, change, layout.mamba_tail)


def _expert_change(
    head: str, number: str | None, leaf: str, matrices: Mapping[str, Tensor], names: Mapping[str, str]
) -> Tensor | None:
    """The same for a matrix of one expert, or of all of them."""
    parts = ["w1", "w3"] if leaf == "gate_up_proj" else [names[leaf]]
    if f"{head}.{parts[0]}.lora_A.weight" not in matrices:
        return None
    changes = []
    for part in parts:
        a, b = (matrices[f"{head}.{part}.lora_{x}.weight"].cpu() for x in "AB")
        if number is not None:
            a, b = (m[0 if len(m) == 1 else int(number)] for m in (a, b))
        changes.append(b @ a)
    return torch.cat(changes, -2)
