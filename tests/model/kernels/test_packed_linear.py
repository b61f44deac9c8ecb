"""Products with packed weights are those with the weights written out, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from palestra.model.lora.linear import frozen_linear
from palestra.model.quantised.forms import FORMS
from palestra.model.quantised.packed import PackedWeight, Scratch

pytestmark = pytest.mark.usefixtures("with_kernels")
OUTPUTS, INPUTS = 70, 320  # no multiples of the tiles'


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, pytest.param(20, marks=pytest.mark.slow), 70])
def test_packed_products_agree_with_the_weight_written_out(
    form: str, rows: int, device: str, dtype: torch.dtype, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    weight = PackedWeight.of(torch.randn(OUTPUTS, INPUTS, device=device), FORMS[form], dtype, Scratch())
    x, bias = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((rows, INPUTS), (OUTPUTS,)))
    assert_close(weight.linear(x, bias), linear(x.float(), weight.dense().float(), bias.float()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuBLASLt's bits")
@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288), (2560, 9728)])
def test_bits_are_those_of_the_weight_written_out(form: str, shape: tuple[int, int]) -> None:
    from palestra.model.kernels.packed_linear import MOST_ROWS
    from palestra.model.numerics import set_numerics

    set_numerics("exact")
    weight = PackedWeight.of(torch.randn(*shape, device="cuda") * 0.02, FORMS[form], torch.bfloat16, Scratch())
    x = torch.randn(2048, shape[1], device="cuda", dtype=torch.bfloat16)
    among = linear(x, weight.dense())
    for rows in (1, 2, 16, 33, 64, 256):
        assert torch.equal(frozen_linear(x[:rows], weight, None), among[:rows]), rows
        if rows <= MOST_ROWS:
            assert torch.equal(weight.linear(x[:rows], None), among[:rows]), rows
