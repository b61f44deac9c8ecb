"""An adapter as a GGUF file, which llama.cpp adds to a base in any form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.gguf.families import GgufFamily, gguf_family
from palestra.checkpoints.gguf.weight_names import is_paired, paired, tensor_names
from palestra.model.loading.spec import ModelSpec
from palestra.model.lora.adapter_files import adapter_matrices
from palestra.model.lora.adapter_names import HEAD
from palestra.model.lora.adapters import Adapter
from palestra.model.lora.expert_names import PARTS

_EXPERTS = {part: leaf for leaf, part in PARTS.items()}


def write_adapter_file(adapter: Adapter, spec: ModelSpec, file: Path, name: str) -> None:
    """A and B of every matrix, in float32. Raises CheckpointError where the format has no such model or cannot say what
    was trained."""
    import gguf

    family, matrices = gguf_family(spec), adapter_matrices(adapter)
    if spec.tie_embeddings and f"{HEAD}.lora_A.weight" in matrices:
        raise CheckpointError(
            "this adapter trains the unembedding of a tied model, and a GGUF adapter cannot change it without the "
            "embedding; use --as gguf, or train with model.train_unembed=false"
        )
    writer = gguf.GGUFWriter(file, family.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.stack.layout.scale * adapter.config.rank)
    for key, tensor in _tensors(spec, family, matrices):
        writer.add_tensor(key, tensor.cpu().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(spec: ModelSpec, family: GgufFamily, matrices: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    names = tensor_names(family, spec.n_layers)
    n_experts = {f"model.layers.{n}.mlp.experts": experts.n_experts for n, experts in spec.experts.items()}
    for key, matrix in matrices.items():
        module, _, kind = key.partition(".lora_")
        head, _, leaf = module.rpartition(".")
        if head in n_experts:  # each has its own in the file, also of what they share
            module, matrix = f"{head}.{_EXPERTS[leaf]}", matrix.expand(n_experts[head], -1, -1)
        name = names.get_name(module)
        if name is None:
            raise CheckpointError(f"GGUF has no name for {module} in a model of {family.architecture}")
        is_b = kind.startswith("B")
        if is_b and is_paired(module, family):
            matrix = paired(matrix, module, spec)
        yield f"{name}.weight.lora_{'b' if is_b else 'a'}", matrix
