"""What weights are called in a GGUF file, and the order of their rows there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from palestra.checkpoints.gguf.families import GgufFamily
from palestra.model.loading.spec import ModelSpec

if TYPE_CHECKING:
    from gguf import TensorNameMap


def tensor_names(family: GgufFamily, n_layers: int) -> TensorNameMap:
    import gguf

    by_name = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(by_name[family.architecture], n_layers)


def is_paired(module: str, family: GgufFamily) -> bool:
    """Whether the module's rows are in another order in the file."""
    return family.has_pairs and module.endswith(("q_proj", "k_proj"))


def paired(rows: Tensor, module: str, spec: ModelSpec) -> Tensor:
    """Rows of queries or keys with the two dimensions that rotate together beside each other."""
    n_heads = spec.n_heads if module.endswith("q_proj") else spec.n_kv_heads
    return rows.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).reshape(rows.shape)
