"""Weights of a merged model in 8 bits, laid out as published checkpoints have them, which vLLM and transformers read.

X.weight             float8_e4m3fn [outputs, inputs]
X.weight_scale_inv   float32 [outputs / 128, inputs / 128], rounded up: what each block of codes is multiplied by
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from palestra.model.errors import UnsupportedModel
from palestra.model.loading.packed_files import BLOCK_SCALES, BLOCK_STATES, FP8_BLOCK
from palestra.model.lora.adapter_names import ATTENTION, DENSE
from palestra.model.quantised.forms import FORMS, levels, quantise

ExportPacking = Literal["fp8", "nf4"]
NF4 = FORMS["nf4"]
LARGEST = 448.0  # of e4m3
LINEARS = ATTENTION | DENSE | {"q_b_proj", "kv_b_proj"}
"""What is packed. Routers, gates of states, embeddings and the unembedding are small, or ask for precision."""


def require_matrices(shapes: Iterable[tuple[str, Sequence[int]]]) -> None:
    """Raises UnsupportedModel for a model whose files have all experts of a layer in one tensor."""
    for name, shape in shapes:
        if len(shape) == 3 and not name.endswith("conv1d.weight"):
            raise UnsupportedModel(
                f"{name} holds all experts of a layer, which these layouts have not: choose --dtype bfloat16"
            )


def is_packed(name: str, shape: Sequence[int], prefix: str, packing: ExportPacking) -> bool:
    """`prefix`: what names of the text model begin with; towers stay as they are."""
    module, _, kind = name.rpartition(".")
    is_linear = kind == "weight" and name.startswith(f"{prefix}layers.") and module.rpartition(".")[2] in LINEARS
    return is_linear and (packing == "fp8" or shape[-1] % NF4.group == 0)


def packed_parts(name: str, weight: Tensor, packing: ExportPacking) -> dict[str, Tensor]:
    """The tensors that stand for a matrix."""
    if packing == "fp8":
        codes, scales = packed_fp8(weight)
        return {name: codes, f"{name}_scale_inv": scales}
    codes, scales = quantise(weight, NF4)
    state = {"quant_type": "nf4", "blocksize": NF4.group, "dtype": "bfloat16", "shape": list(weight.shape)}
    return {
        name: ((codes << 4) | (codes >> 4)).view(-1, 1),  # the first code is in the high half
        f"{name}{BLOCK_SCALES}": scales.flatten(),
        f"{name}.quant_map": levels("nf4").clone(),
        f"{name}{BLOCK_STATES[0]}": torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8),
    }


def packed_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix; the largest number of a block is the largest that a code can say."""
    rows, columns = weight.shape
    high, wide = ceil(rows / FP8_BLOCK), ceil(columns / FP8_BLOCK)
    padded = pad(weight.float(), (0, wide * FP8_BLOCK - columns, 0, high * FP8_BLOCK - rows))
    blocks = padded.view(high, FP8_BLOCK, wide, FP8_BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    relative = blocks / torch.where(scales == 0, 1.0, scales)[:, None, :, None]
    codes = relative.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:rows, :columns].contiguous(), scales


def packing_config(packing: ExportPacking, kept: list[str]) -> dict[str, Any]:
    """What `config.json` says of it; `kept`: modules that are as they were."""
    if packing == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": kept,
        }
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": kept,
    }
