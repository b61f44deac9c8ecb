"""An adapter as a GGUF file, which llama.cpp adds to a base in any form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.gguf.families import GgufFamily
from palestra.checkpoints.gguf.readability import gguf_family
from palestra.checkpoints.gguf.weight_names import WeightNames
from palestra.checkpoints.gguf.weight_order import column_order, row_order
from palestra.model.loading.spec import ModelSpec
from palestra.model.lora.adapter_files import adapter_matrices
from palestra.model.lora.adapter_names import HEAD, join_rows
from palestra.model.lora.adapters import Adapter
from palestra.model.lora.expert_names import expert_parts

_EXPERT_KEY = re.compile(r"(?P<head>.*\.layers\.(?P<layer>\d+)\..*experts)\.(?P<part>w[123])\.(?P<kind>lora_.*)")


def write_adapter_file(adapter: Adapter, spec: ModelSpec, file: Path, name: str) -> None:
    """A and B of every matrix, in float32. Raises CheckpointError where the format has no such model or cannot say what
    was trained."""
    import gguf

    family, matrices = gguf_family(spec), adapter_matrices(adapter)
    _require_readable(spec, family, matrices)
    writer = gguf.GGUFWriter(file, family.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.stack.layout.scale * adapter.config.rank)
    for key, tensor in _tensors(spec, family, adapter, matrices):
        writer.add_tensor(key, tensor.cpu().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _require_readable(spec: ModelSpec, family: GgufFamily, matrices: Mapping[str, Tensor]) -> None:
    """Readers of the format leave some matrices of an adapter away, and say nothing."""

    def trains(*parts: str) -> bool:
        return any(part in key for key in matrices for part in parts)

    if spec.tie_embeddings and trains(f"{HEAD}."):
        raise CheckpointError(
            "this adapter trains the unembedding of a tied model, and a GGUF adapter cannot change it without the "
            "embedding; use --as gguf, or train with model.train_unembed=false"
        )
    if family.is_gemma4 and trains(".experts."):
        raise CheckpointError(
            "this adapter trains experts of Gemma 4, and readers of a GGUF adapter would leave their scales away; use "
            "--as gguf, or train with model.train_mlp=false"
        )
    if family.has_latent_attention and trains(".q_a_proj.", ".q_proj.", ".kv_a_proj_with_mqa.", f"{HEAD}."):
        raise CheckpointError(
            "this adapter trains latent attention or the unembedding beside it, which readers of a GGUF adapter leave "
            "as they were; use --as gguf, or train with model.train_attn=false and model.train_unembed=false"
        )


def _tensors(
    spec: ModelSpec, family: GgufFamily, adapter: Adapter, matrices: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    names = WeightNames(family, spec.n_layers)
    experts = _of_each_expert(spec, adapter, matrices)
    others = {key: matrix for key, matrix in matrices.items() if ".experts." not in key}
    for key, matrix in (join_rows(others, adapter.stack.layout.mamba_tail) | experts).items():
        module, _, kind = key.partition(".lora_")
        is_b = kind.startswith("B")
        columns = column_order(module, spec)
        for part, rows in row_order(module, spec, family):
            if is_b:  # readers divide alpha by the rank of this matrix, which is larger where several are joined
                numbers = (matrix if rows is None else matrix[rows]) * (matrix.shape[-1] / adapter.config.rank)
            else:
                numbers = matrix if columns is None else matrix[:, columns]
            yield f"{names.of(part).removesuffix('.weight')}.weight.lora_{'b' if is_b else 'a'}", numbers


def _of_each_expert(spec: ModelSpec, adapter: Adapter, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of experts by the names of their modules; what they share, each of them has."""
    leaves = {part: leaf for leaf, part in expert_parts(adapter.stack.layout).items()}
    found: dict[str, Tensor] = {}
    for key, matrix in matrices.items():
        if named := _EXPERT_KEY.fullmatch(key):
            n_experts = spec.experts[int(named["layer"])].n_experts
            found[f"{named['head']}.{leaves[named['part']]}.{named['kind']}"] = matrix.expand(n_experts, -1, -1)
    return found
