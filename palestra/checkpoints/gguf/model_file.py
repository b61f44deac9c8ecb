"""A whole model as one GGUF file: its shape and its tokenizer as metadata, then the weights, one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.gguf.families import GgufFamily, gguf_family
from palestra.checkpoints.gguf.shape_metadata import add_shape
from palestra.checkpoints.gguf.tokenizer_metadata import add_tokenizer
from palestra.checkpoints.gguf.weight_names import is_paired, paired, tensor_names
from palestra.model.attention.rope import Rotary
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weight_files import HEADS, PREFIXES, WeightFiles
from palestra.model.lora.adapters import Adapter
from palestra.model.lora.merged_export import MergedWeights
from palestra.runs.export_form import GgufQuant, GgufSettings

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

ROPE_FACTORS = "rope_freqs.weight"
_AS_STORED: dict[torch.dtype, GgufQuant] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    """In the file."""
    source: str
    """Among the merged weights."""
    shape: tuple[int, ...]
    kind: GGMLQuantizationType


def write_model_file(adapter: Adapter, base: Path, file: Path, name: str, settings: GgufSettings) -> None:
    """Base and adapter folded into one, matrices in the form of the settings, vectors always in float32. Raises
    CheckpointError where the format has no such model."""
    import gguf

    spec = ModelSpec.from_folder(base)
    family = gguf_family(spec)
    with WeightFiles(base) as files:
        weights = MergedWeights(adapter, files, is_tied=spec.tie_embeddings)
        quant = settings.quant or _AS_STORED[weights.main_dtype]
        tensors = _tensors(spec, family, files, weights, quant)
        factors = _rope_factors(spec)
        writer = gguf.GGUFWriter(file, family.architecture)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        writer.add_file_type(gguf.LlamaFileType[_file_type(quant)])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_shape(writer, spec, family)
        add_tokenizer(writer, base, spec.vocab_size, pre_tokenizer=settings.pre_tokenizer)
        if factors is not None:
            writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        for tensor in tensors:
            _add_info(writer, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for tensor in tensors:
            writer.write_tensor_data(encode_tensor(_arranged(weights, tensor, spec, family), tensor.kind, tensor.name))
        writer.close()


def encode_tensor(tensor: Tensor, kind: GGMLQuantizationType, name: str) -> np.ndarray:
    """The numbers as the file has them."""
    from gguf import GGMLQuantizationType as Kind
    from gguf import quants

    if kind == Kind.BF16:
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    if kind == Kind.F16:
        half = tensor.to(torch.float16)
        if half.isinf().any():
            raise CheckpointError(f"{name} has numbers that float16 cannot hold; use --quant bf16, f32 or q8_0")
        return half.contiguous().numpy()
    numbers = tensor.float().contiguous().numpy()
    return numbers if kind == Kind.F32 else quants.quantize(numbers, kind)


def _tensors(
    spec: ModelSpec, family: GgufFamily, files: WeightFiles, weights: MergedWeights, quant: GgufQuant
) -> list[GgufTensor]:
    names, found = tensor_names(family, spec.n_layers), []
    for source in weights.names:
        if source in HEADS and spec.tie_embeddings and not weights.is_untied:
            continue  # a copy
        if source not in HEADS and not source.startswith(files.prefix):
            continue  # what reads pictures
        plain = "lm_head.weight" if source in HEADS else PREFIXES[0] + source.removeprefix(files.prefix)
        name = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise CheckpointError(f"GGUF has no name for {source} in a model of {family.architecture}")
        shape = weights.shape(source)
        found.append(GgufTensor(name, source, shape, _kind(shape, quant)))
    return found


def _kind(shape: tuple[int, ...], quant: GgufQuant) -> GGMLQuantizationType:
    """Matrices whose rows do not divide into the form's blocks are float16."""
    from gguf import GGML_QUANT_SIZES
    from gguf import GGMLQuantizationType as Kind

    if len(shape) == 1:
        return Kind.F32
    kind = Kind[quant.upper()]
    return kind if shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else Kind.F16


def _file_type(quant: GgufQuant) -> str:
    return "ALL_F32" if quant == "f32" else f"MOSTLY_{quant.upper()}"


def _add_info(writer: GGUFWriter, tensor: GgufTensor) -> None:
    from gguf import GGML_QUANT_SIZES, quant_shape_to_byte_shape

    block, size = GGML_QUANT_SIZES[tensor.kind]
    n_bytes = int(np.prod(tensor.shape)) // block * size
    shape = quant_shape_to_byte_shape(tensor.shape, tensor.kind)
    writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), n_bytes, raw_dtype=tensor.kind)


def _arranged(weights: MergedWeights, tensor: GgufTensor, spec: ModelSpec, family: GgufFamily) -> Tensor:
    """A weight as readers of the format use it."""
    weight = weights.tensor(tensor.source)
    module = tensor.source.rpartition(".")[0]
    if is_paired(module, family):
        return paired(weight, module, spec)
    if spec.has_offset_norms and tensor.source.endswith("norm.weight"):
        return weight.float() + 1
    return weight


def _rope_factors(spec: ModelSpec) -> np.ndarray | None:
    """What llama3's scaling divides each frequency by, which the file has as a tensor; None for other ropes."""
    if spec.rope.type != "llama3":
        return None
    exponents = torch.arange(0, spec.rope.dim, 2).float() / spec.rope.dim
    return (spec.rope.theta**-exponents / Rotary.of(spec.rope).inverse_frequencies).numpy()
