"""The base model with an adapter folded in, as a plain Hugging Face folder in the layout and dtype of the base."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from palestra.model.loading.weight_files import PREFIXES, WeightFiles
from palestra.model.loading.weights import by_turns
from palestra.model.lora.adapter_files import adapter_matrices, new_folder
from palestra.model.lora.adapter_names import HEAD, WHOLES
from palestra.model.lora.adapters import Adapter, Layout
from palestra.model.lora.expert_names import PARTS
from palestra.util.files import whole_folder

log = logging.getLogger(__name__)
_EXPERTS = re.compile(r"(.*\.experts)(?:\.(\d+))?\.(gate_up_proj|gate_proj|up_proj|down_proj)")


def export_merged(adapter: Adapter, base: str | Path, folder: str | Path) -> None:
    """Writes the base model with the adapter folded in; a tied unembedding, if trained, gets a matrix of its own.

    Weights that the base keeps in 4 or 8 bits are written in bfloat16, since the sum does not fit their form.
    """
    base, matrices = Path(base), adapter_matrices(adapter)
    config = json.loads((base / "config.json").read_text())
    with whole_folder(new_folder(folder)) as temporary, WeightFiles(base) as files:
        head = f"{HEAD}.weight"
        untied = f"{HEAD}.lora_A.weight" in matrices and _untie(config)
        names = [n for n in files if not (untied and n == head)]  # some tied folders hold a copy
        sources = {name: name for name in names}
        if untied:  # from here on the two differ
            sources[head] = f"{files.prefix}embed_tokens.weight"
        merged = {}
        for name, source in sources.items():
            weight, change = files.tensor(source), _change(name, files.prefix, matrices, adapter.stack.layout)
            dtype = torch.bfloat16 if files.packing(source) else weight.dtype
            if change is not None:
                weight = weight.float() + adapter.stack.layout.scale * change
            merged[name] = weight.to(dtype).contiguous()
        if files.unpacked:
            _forget_packing(config)
            log.info("merged_from_packed folder=%s packed=%s written_as=bfloat16", folder, ",".join(files.unpacked))
        for extra in base.iterdir():
            if extra.is_file() and extra.suffix in (".json", ".jinja", ".model", ".txt") and "index" not in extra.name:
                shutil.copy(extra, temporary / extra.name)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(merged, temporary / "model.safetensors", metadata={"format": "pt"})


def _untie(config: dict[str, Any]) -> bool:
    """Whether the config said that the embeddings are tied; from here on it says that they are not."""
    levels = [level for level in (config, config.get("text_config")) if level and level.get("tie_word_embeddings")]
    for level in levels:
        level["tie_word_embeddings"] = False
    return bool(levels)


def _forget_packing(config: dict[str, Any]) -> None:
    for level in (config, config.get("text_config") or {}):
        level.pop("quantization_config", None)


def _change(name: str, prefix: str, matrices: Mapping[str, Tensor], layout: Layout) -> Tensor | None:
    """What the adapter adds to a tensor of the files, before scaling; None: nothing."""
    module = name.removesuffix(".weight")
    if module.startswith(prefix):
        module = PREFIXES[0] + module.removeprefix(prefix)
    if found := _EXPERTS.fullmatch(module):
        change = _expert_change(found[1], found[2], found[3], matrices)
        if change is None or not layout.is_interleaved:
            return change
        return (by_turns(change) if found[3] == "gate_up_proj" else change).mT
    head, _, leaf = module.rpartition(".")
    parts = [f"{head}.{part}" for part in WHOLES[leaf]] if leaf in WHOLES else [module]
    if f"{parts[0]}.lora_A.weight" not in matrices:
        return None
    return torch.cat([matrices[f"{p}.lora_B.weight"].cpu() @ matrices[f"{p}.lora_A.weight"].cpu() for p in parts])


def _expert_change(head: str, number: str | None, leaf: str, matrices: Mapping[str, Tensor]) -> Tensor | None:
    """The same for a matrix of one expert, or of all of them."""
    parts = ["w1", "w3"] if leaf == "gate_up_proj" else [PARTS[leaf]]
    if f"{head}.{parts[0]}.lora_A.weight" not in matrices:
        return None
    changes = []
    for part in parts:
        a, b = (matrices[f"{head}.{part}.lora_{x}.weight"].cpu() for x in "AB")
        if number is not None:
            a, b = (m[0 if len(m) == 1 else int(number)] for m in (a, b))
        changes.append(b @ a)
    return torch.cat(changes, -2)
