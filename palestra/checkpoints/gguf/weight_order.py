"""The order of rows and columns of weights in a GGUF file, where it is not that of a Hugging Face folder.

queries and keys           dimensions that rotate together stand beside each other: [heads, half, 2] of [heads, 2, half]
value heads of delta nets  those of all key heads by turns: [values of a key head, key heads] of the other way round
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from palestra.checkpoints.gguf.families import GgufFamily
from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.loading.spec import ModelSpec

_DELTA_NET = re.compile(r".*\.layers\.(\d+)\.linear_attn\.(\w+)")


def row_order(module: str, spec: ModelSpec, family: GgufFamily) -> Tensor | None:
    """Which row of a module's weight stands at each place; None: they stand as they are."""
    if family.has_pairs and module.endswith(("q_proj", "k_proj")):
        n_heads = spec.n_heads if module.endswith("q_proj") else spec.n_kv_heads
        return torch.arange(n_heads * spec.head_dim).unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten()
    if (found := _delta_net(module, spec)) is None:
        return None
    mixer, leaf = found
    match leaf:
        case "in_proj_qkv" | "conv1d":
            keys = 2 * mixer.key_size
            return torch.cat([torch.arange(keys), keys + _by_turns(mixer, mixer.value_dim)])
        case "in_proj_z":
            return _by_turns(mixer, mixer.value_dim)
        case "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias":
            return _by_turns(mixer, 1)
    return None


def column_order(module: str, spec: ModelSpec) -> Tensor | None:
    """The same for the columns."""
    found = _delta_net(module, spec)
    return _by_turns(found[0], found[0].value_dim) if found is not None and found[1] == "out_proj" else None


def _delta_net(module: str, spec: ModelSpec) -> tuple[DeltaNetSpec, str] | None:
    """The delta net that a module is part of, and the module's name within it."""
    if (found := _DELTA_NET.fullmatch(module)) is None:
        return None
    mixer = spec.layers[int(found[1])].mixer
    return (mixer, found[2]) if isinstance(mixer, DeltaNetSpec) else None


def _by_turns(mixer: DeltaNetSpec, width: int) -> Tensor:
    n_values, n_keys = mixer.n_value_heads, mixer.n_key_heads
    return torch.arange(n_values * width).view(n_keys, n_values // n_keys, width).transpose(0, 1).flatten()
