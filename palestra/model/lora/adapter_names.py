"""Names of an adapter's matrices in files: Tinker's and PEFT's.

Where a checkpoint keeps several of our projections as rows of one matrix, Tinker's files (and ours, by default) have
an A and a B for each. PEFT knows the one matrix only: there the A matrices are stacked, and B is block-diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from palestra.model.errors import AdapterError

AdapterFormat = Literal["tinker", "peft"]
Matrices = dict[str, Tensor]
"""By module, then ".lora_A.weight" or ".lora_B.weight"."""

PREFIX = "base_model.model."
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa", "o_proj"})
DELTA_NET = frozenset({"in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "out_proj", "in_proj_qkv", "in_proj_qkvz"})
MAMBA = frozenset({"x_proj", "in_proj", "out_proj"})
"""Beside these its `gate_proj`, which no feed-forward network of such a model has."""
EXPERTS = frozenset({"w1", "w2", "w3"})
DENSE = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj"})
MLP = DENSE | EXPERTS | {"fc1_latent_proj", "fc2_latent_proj"}
HEAD = "lm_head"
TIED_HEAD = "model.unembed_tokens"
"""What the Tinker cookbook calls the unembedding of a model that has none of its own."""
WHOLES = {"in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"), "in_proj": ("gate_proj", "x_proj")}
"""Modules of checkpoints whose rows are trained apart. Behind those of the last one stand rows that are not trained."""
TAILED = "in_proj"


def module_name(key: str) -> str:
    """A key of a file as we name it: without the wrappers that differ between those who write such files."""
    key = key.removeprefix(PREFIX)
    for wrapper in ("model.language_model.", "language_model.model."):
        if key.startswith(wrapper):
            return "model." + key.removeprefix(wrapper)
    return HEAD + key.removeprefix(TIED_HEAD) if key.startswith(TIED_HEAD + ".") else key


def whole_of(module: str) -> tuple[str, tuple[str, ...]] | None:
    """The matrix of a checkpoint that has this module's rows, and all modules that have some, in order."""
    head, _, leaf = module.rpartition(".")
    for whole, parts in WHOLES.items():
        if leaf in parts and (leaf not in DENSE or head.endswith("mixer")):
            return f"{head}.{whole}", tuple(f"{head}.{part}" for part in parts)
    return None


def join_rows(matrices: Mapping[str, Tensor], tail: int) -> Matrices:
    """Joins parts for PEFT: A matrices are stacked, B matrices on the diagonal. `tail`: rows of `in_proj` that are not
    trained."""
    joined: Matrices = {}
    for key, tensor in matrices.items():
        module, _, kind = key.partition(".lora_")
        found = whole_of(module)
        if found is None:
            joined[key] = tensor
        elif module == found[1][0]:
            parts = [matrices[f"{part}.lora_{kind}"] for part in found[1]]
            whole = torch.cat(parts) if kind[0] == "A" else with_tail(found[0], torch.block_diag(*parts), tail)
            joined[f"{found[0]}.lora_{kind}"] = whole
    return joined


def with_tail(whole: str, rows: Tensor, tail: int) -> Tensor:
    """The rows of a whole's parts, and zeros for those behind them."""
    return torch.cat([rows, rows.new_zeros(tail, rows.shape[1])]) if whole.endswith(f".{TAILED}") else rows


def split_rows(stored: Matrices, sizes: Mapping[str, int], rank: int, tail: int) -> None:
    """The way back, in place; `sizes` has the rows of each part. A whole of the adapter's own rank is split, too: each
    part gets a copy of its A."""
    for key in [key for key in stored if key.partition(".lora_")[0].rpartition(".")[2] in WHOLES]:
        module, _, kind = key.partition(".lora_")
        head, _, leaf = module.rpartition(".")
        parts, tensor = [f"{head}.{part}" for part in WHOLES[leaf]], stored.pop(key)
        if any(part not in sizes for part in parts):
            raise AdapterError(f"{key} has no place in this model")
        if leaf == TAILED and kind[0] == "B":
            tensor, rest = tensor[: len(tensor) - tail], tensor[len(tensor) - tail :]
            if rest.count_nonzero():
                raise AdapterError(f"{key} changes the last {tail} rows, which adapters do not train here")
        rows, is_joined = [sizes[part] for part in parts], tensor.shape[kind[0] == "B"] == rank * len(parts)
        if tensor.ndim != 2 or (kind[0] == "B" and len(tensor) != sum(rows)):
            raise AdapterError(f"{key} has shape {list(tensor.shape)}, this model needs {sum(rows)} rows")
        pieces = tensor.split(rank) if is_joined else [tensor] * len(parts)
        if kind[0] == "B":
            pieces = tensor.split(rows)
            if is_joined:
                blocks = [piece.split(rank, 1)[i] for i, piece in enumerate(pieces)]
                if not torch.equal(torch.block_diag(*blocks), tensor):
                    raise AdapterError(f"{key} mixes the parts' ranks; supported: {len(parts)} blocks of rank {rank}")
                pieces = blocks
        stored.update({f"{part}.lora_{kind}": piece for part, piece in zip(parts, pieces, strict=True)})
