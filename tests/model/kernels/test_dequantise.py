"""The kernel that writes weights out gives the same bits as the plain code."""

from __future__ import annotations

import pytest
import torch

from palestra.model.quantised.forms import FORM_NAMES, FORMS, quantise
from palestra.model.quantised.packed import PackedWeight


@pytest.mark.parametrize("name", FORM_NAMES)
@pytest.mark.parametrize("shape", [(3, 128), (40, 96), (2, 5, 64)])
def test_weights_are_written_out_to_the_same_bits(name, shape, device, dtype, with_kernels, monkeypatch):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(weight, FORMS[name])
    found = PackedWeight(FORMS[name], codes.to(device), scales.to(device), dtype).dense()
    monkeypatch.setattr("palestra.model.kernels.interpreted", False)
    expected = PackedWeight(FORMS[name], codes, scales, dtype).dense()
    assert torch.equal(found.cpu(), expected)
