"""Weights in 8 or 4 bits written out in the model's type: one launch, one lookup per code.

Codes are looked up in a table whatever their form, since few GPUs convert 8-bit floats by themselves.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.model.quantised.forms import Form, FormName, levels

BLOCK = 2048
_tables: dict[tuple[FormName, torch.device], Tensor] = {}


@triton.jit
def _dequantise_kernel(codes, scales, table, out, n, GROUP: tl.constexpr, PER_BYTE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = i < n
    code = tl.load(codes + i // PER_BYTE, mask=real, other=0).to(tl.int32)
    if PER_BYTE == 2:
        code = (code >> ((i % 2) * 4).to(tl.int32)) & 15
    level = tl.load(table + code, mask=real, other=0.0)
    scale = tl.load(scales + i // GROUP, mask=real, other=0.0)
    tl.store(out + i, (level * scale).to(out.dtype.element_ty), mask=real)


def table_on(form: Form, device: torch.device) -> Tensor:
    """The number of each code of a form, on the device."""
    if (form.name, device) not in _tables:
        _tables[form.name, device] = levels(form.name).to(device)
    return _tables[form.name, device]


def dequantise(codes: Tensor, scales: Tensor, form: Form, out: Tensor) -> None:
    """`out` is the form's number for each code, times its group's scale. All are contiguous."""
    n = out.numel()
    _dequantise_kernel[(triton.cdiv(n, BLOCK),)](
        codes.contiguous().view(torch.uint8),
        scales.contiguous(),
        table_on(form, out.device),
        out,
        n,
        GROUP=n // scales.numel(),
        PER_BYTE=n // codes.numel(),
        BLOCK=BLOCK,
    )
