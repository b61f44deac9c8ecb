"""The convolution by kernels agrees with the plain code, with and without states, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from palestra.model.mixers import causal_conv as plain
from palestra.model.mixers.causal_conv import ConvLayout
from tests.properties import examples

Close = Callable[[Tensor, Tensor], None]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
CHANNELS = 37


def tensors(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, weights, and inputs before them of six slots."""
    draw = torch.Generator().manual_seed(seed)
    x, state = torch.randn(rows, CHANNELS, generator=draw), torch.randn(6, 3, CHANNELS, generator=draw)
    return x.to(DEVICE, HALF), torch.randn(4, CHANNELS, generator=draw).to(DEVICE), state.to(DEVICE, HALF)


def tables(lengths: list[int], slots: list[int]) -> tuple[Tensor, Tensor]:
    from palestra.model.mixers.kernel_recurrence import SpanArrays

    arrays = SpanArrays.of(lengths, slots)
    return torch.from_numpy(arrays.rows).to(DEVICE), torch.from_numpy(arrays.table).to(DEVICE)


def assert_near(found: Tensor, expected: Tensor) -> None:
    np.testing.assert_allclose(found.float().cpu(), expected.float().cpu(), rtol=2 * torch.finfo(HALF).eps, atol=1e-3)


def bias_of(seed: int) -> Tensor | None:
    """For every other seed."""
    return torch.randn(CHANNELS, generator=torch.Generator().manual_seed(seed)).to(DEVICE) if seed % 2 else None


@examples(12)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_spans_go_on_from_their_last_inputs(lengths, seed):
    from palestra.model.kernels.causal_conv import causal_conv, keep_inputs

    x, weight, states = tensors(sum(lengths), seed)
    slots, bias = [4, 2, 0, 5, 1][: len(lengths)], bias_of(seed)
    expected, after = plain.causal_conv(x, weight, ConvLayout(lengths, 3, DEVICE), states[slots], bias)
    row_table, spans = tables(lengths, slots)
    now = states.clone()
    assert_near(causal_conv(x, weight, row_table, now, bias), expected)
    assert torch.equal(now, states)
    keep_inputs(x, spans, now)
    assert torch.equal(now[slots], after)
    assert torch.equal(now[3], states[3])


def test_single_rows_move_their_states_on_at_once():
    from palestra.model.kernels.causal_conv import causal_conv, keep_inputs

    x, weight, states = tensors(3)
    row_table, spans = tables([1, 1, 1], [5, 0, 2])
    apart, at_once = states.clone(), states.clone()
    expected = causal_conv(x, weight, row_table, apart)
    keep_inputs(x, spans, apart)
    assert torch.equal(causal_conv(x, weight, row_table, at_once, are_alone=True), expected)
    assert torch.equal(at_once, apart)


def test_rows_of_no_span_touch_nothing():
    from palestra.model.kernels.causal_conv import causal_conv

    x, weight, states = tensors(2)
    row_table = torch.tensor([[-1, 0, 0], [0, 0, 1]], dtype=torch.int32, device=DEVICE)
    now = states.clone()
    causal_conv(x, weight, row_table, now, are_alone=True)
    assert torch.equal(now[0], states[0])
    assert torch.equal(now[1, 2], x[1])


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["", "bias"])
def test_gradients_of_packed_sequences(seed: int, assert_close: Close):
    from palestra.model.kernels.causal_conv import causal_conv

    lengths, bias = [7, 1, 5], bias_of(seed)
    x, weight, _ = tensors(13)
    wide = x.float().requires_grad_()
    x.requires_grad_()
    found = causal_conv(x, weight, tables(lengths, [0, 0, 0])[0], bias=bias)
    expected, _ = plain.causal_conv(wide, weight, ConvLayout(lengths, 3, DEVICE), bias=bias)
    assert_close(found, expected)
    grad = torch.randn_like(found)
    (ours,), (truth,) = torch.autograd.grad(found, x, grad), torch.autograd.grad(expected, wide, grad.float())
    assert_close(ours, truth)
