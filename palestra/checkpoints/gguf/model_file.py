"""A whole model as one GGUF file: its shape and its tokenizer as metadata, then the weights, one at a time."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.gguf.readability import gguf_family
from palestra.checkpoints.gguf.shape_metadata import add_shape
from palestra.checkpoints.gguf.tensor_plan import PlannedTensor, plan_tensors
from palestra.checkpoints.gguf.tokenizer_metadata import add_tokenizer
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.lora.adapters import Adapter
from palestra.model.lora.merged_export import MergedWeights
from palestra.runs.export_form import GgufQuant, GgufSettings

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

_FILE_TYPES: dict[GgufQuant, str] = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}
_AS_STORED: dict[torch.dtype, GgufQuant] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def write_model_file(adapter: Adapter, base: Path, file: Path, name: str, settings: GgufSettings) -> None:
    """Base and adapter folded into one, matrices in the form of the settings, vectors always in float32. Raises
    CheckpointError where the format has no such model."""
    import gguf

    spec = ModelSpec.from_folder(base)
    family = gguf_family(spec)
    if settings.quant == "mxfp4" and not spec.experts:
        raise CheckpointError(f"mxfp4 is for experts, and {spec.architecture} has none; use --quant q4_0 or q8_0")
    with WeightFiles(base) as files:
        weights = MergedWeights(adapter, files, spec)
        quant = settings.quant or _AS_STORED[weights.main_dtype]
        tensors = [(tensor, _kind(tensor, quant)) for tensor in plan_tensors(spec, family, files, weights)]
        writer = gguf.GGUFWriter(file, family.architecture)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(quant, f"MOSTLY_{quant.upper()}")])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_shape(writer, spec, family)
        add_tokenizer(writer, base, spec.vocab_size, family, pre_tokenizer=settings.pre_tokenizer)
        for tensor, kind in tensors:
            _add_info(writer, tensor, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, kind in tensors:
            writer.write_tensor_data(_encoded(tensor.read(), kind, tensor.name))
        weights.require_all_used()
        writer.close()


def _kind(tensor: PlannedTensor, quant: GgufQuant) -> GGMLQuantizationType:
    """Matrices whose rows do not divide into the form's blocks are float16."""
    from gguf import GGML_QUANT_SIZES
    from gguf import GGMLQuantizationType as Kind

    if tensor.is_float32:
        return Kind.F32
    kind = Kind.Q8_0 if quant == "mxfp4" and not tensor.is_of_experts else Kind[quant.upper()]
    return kind if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else Kind.F16


def _add_info(writer: GGUFWriter, tensor: PlannedTensor, kind: GGMLQuantizationType) -> None:
    from gguf import GGML_QUANT_SIZES, quant_shape_to_byte_shape

    block, size = GGML_QUANT_SIZES[kind]
    n_bytes = prod(tensor.shape) // block * size
    shape = quant_shape_to_byte_shape(tensor.shape, kind)
    writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), n_bytes, raw_dtype=kind)


def _encoded(tensor: Tensor, kind: GGMLQuantizationType, name: str) -> np.ndarray:
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
