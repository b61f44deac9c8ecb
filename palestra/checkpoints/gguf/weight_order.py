"""The order of rows and columns of weights in a GGUF file, where it is not that of a Hugging Face folder.

queries and keys           dimensions that rotate together stand beside each other: [heads, half, 2] of [heads, 2, half]
value heads of delta nets  those of all key heads by turns: [values of a key head, key heads] of the other way round
Qwen3-Next's delta nets    one matrix by key heads becomes two, of which one has all queries, then keys, then values
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from palestra.checkpoints.gguf.families import GgufFamily
from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.loading.spec import ModelSpec

_DELTA_NET = re.compile(r".*\.layers\.(\d+)\.linear_attn\.(\w+)")
Rows = tuple[str, Tensor | None]
"""A module of the file, and which row of ours stands at each place; None: all of them as they are."""


def row_order(module: str, spec: ModelSpec, family: GgufFamily) -> list[Rows]:
    """The modules that one of a Hugging Face folder becomes."""
    if family.has_pairs and module.endswith(("q_proj", "k_proj")):
        n_heads = spec.n_heads if module.endswith("q_proj") else spec.n_kv_heads
        rows = torch.arange(n_heads * spec.head_dim).unflatten(0, (n_heads, 2, -1))
        return [(module, rows.transpose(1, 2).flatten())]
    if (found := _delta_net(module, spec)) is None:
        return [(module, None)]
    mixer, leaf = found
    if mixer.is_interleaved:
        return _parts_of_key_heads(module, mixer) if leaf == "in_proj_qkvz" else [(module, None)]
    match leaf:
        case "in_proj_qkv" | "conv1d":
            keys = 2 * mixer.key_size
            return [(module, torch.cat([torch.arange(keys), keys + _by_turns(mixer, mixer.value_dim)]))]
        case "in_proj_z":
            return [(module, _by_turns(mixer, mixer.value_dim))]
        case "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias":
            return [(module, _by_turns(mixer, 1))]
    return [(module, None)]


def column_order(module: str, spec: ModelSpec) -> Tensor | None:
    """Which column of a module's weight stands at each place; None: they stand as they are."""
    found = _delta_net(module, spec)
    if found is None or found[1] != "out_proj" or found[0].is_interleaved:
        return None
    return _by_turns(found[0], found[0].value_dim)


def _delta_net(module: str, spec: ModelSpec) -> tuple[DeltaNetSpec, str] | None:
    """The delta net that a module is part of, and the module's name within it."""
    if (found := _DELTA_NET.fullmatch(module)) is None:
        return None
    mixer = spec.layers[int(found[1])].mixer
    return (mixer, found[2]) if isinstance(mixer, DeltaNetSpec) else None


def _parts_of_key_heads(module: str, mixer: DeltaNetSpec) -> list[Rows]:
    """Queries, keys and values, and the gates, of rows that are by key head: [key heads, its q, k, v and gates]."""
    values = mixer.value_size // mixer.n_key_heads
    by_head = torch.arange(mixer.conv_size + mixer.value_size).view(mixer.n_key_heads, -1)
    q, k, v, z = by_head.split([mixer.key_dim, mixer.key_dim, values, values], dim=1)
    head = module.removesuffix("qkvz")
    return [(f"{head}qkv", torch.cat([part.flatten() for part in (q, k, v)])), (f"{head}z", z.flatten())]


def _by_turns(mixer: DeltaNetSpec, width: int) -> Tensor:
    n_values, n_keys = mixer.n_value_heads, mixer.n_key_heads
    return torch.arange(n_values * width).view(n_keys, n_values // n_keys, width).transpose(0, 1).flatten()
