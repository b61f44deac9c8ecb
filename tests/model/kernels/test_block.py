"""The fused elementwise kernels agree with the plain code in float32, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from palestra.model import block_ops as ops
from palestra.model.attention.rope import Rotary

Close = Callable[[Tensor, Tensor], None]

EPS = 1e-6


@pytest.mark.parametrize(("rows", "n", "has_wide_weight"), [(3, 48, False), (2, 130, True)])
def test_residual_and_norm(
    rows: int, n: int, has_wide_weight: bool, device: str, dtype: torch.dtype, assert_close: Close
) -> None:
    from palestra.model.kernels import block

    hidden, update = (torch.randn(rows, n, device=device, dtype=dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(n, device=device, dtype=torch.float32 if has_wide_weight else dtype)
    found = block.add_rms_norm(hidden, update, weight, EPS)
    wide = [x.detach().float().requires_grad_() for x in (hidden, update)]
    expected = ops.add_rms_norm(wide[0], wide[1], weight.float(), EPS)
    grads = [torch.randn_like(x) for x in found]
    d_found = torch.autograd.grad(found, (hidden, update), grads)
    d_expected = torch.autograd.grad(expected, wide, [g.float() for g in grads])
    for a, b in zip((*found, *d_found), (*expected, *d_expected), strict=True):
        assert_close(a, b)


def test_the_last_norm_has_no_residual_gradient(device: str, dtype: torch.dtype, assert_close: Close) -> None:
    from palestra.model.kernels import block

    hidden = torch.randn(2, 32, device=device, dtype=dtype).requires_grad_()
    weight = torch.ones(32, device=device, dtype=dtype)
    _, normed = block.add_rms_norm(hidden, None, weight, EPS)
    normed.sum().backward()
    wide = hidden.detach().float().requires_grad_()
    ops.rms_norm(wide, weight.float(), EPS).sum().backward()
    assert hidden.grad is not None
    assert wide.grad is not None
    assert_close(hidden.grad, wide.grad)


@pytest.mark.parametrize(
    ("dim", "turned", "heads", "norm"),
    [(16, 16, (4, 2, 2), "half"), (24, 24, (3, 1, 1), None), (16, 4, (2, 1, 1), "wide"), (16, 0, (2, 1, 1), "half")],
)
def test_heads_are_normalised_and_rotated(
    dim: int,
    turned: int,
    heads: tuple[int, int, int],
    norm: str | None,
    device: str,
    dtype: torch.dtype,
    assert_close: Close,
) -> None:
    from palestra.model.kernels import block

    qkv = torch.randn(4, sum(heads) * dim, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(heads[0] + heads[1], dim, device=device, dtype=torch.float32 if norm == "wide" else dtype)
    weight = weight if norm else None
    rotary = Rotary(10000.0 ** (-torch.arange(0, turned, 2, device=device).float() / turned), 1.0)
    angles = rotary.angles(torch.arange(4, device=device) * 3, dtype).turn
    found = block.rotate_heads(qkv, weight, angles, EPS, heads)
    wide = qkv.detach().float().requires_grad_()
    plain = None if weight is None else weight.float()
    expected = ops.rotate_heads(wide, plain, (angles[0].float(), angles[1].float()), EPS, heads)
    grads = [torch.randn_like(x) for x in found]
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)
    (d_found,) = torch.autograd.grad(found, qkv, grads)
    assert_close(d_found, torch.autograd.grad(expected, wide, [g.float() for g in grads])[0])


def test_swiglu(device: str, dtype: torch.dtype, assert_close: Close) -> None:
    from palestra.model.kernels import block

    gate_up = torch.randn(3, 2 * 37, device=device, dtype=dtype).requires_grad_()
    wide = gate_up.detach().float().requires_grad_()
    found, expected = block.swiglu(gate_up), ops.swiglu(wide)
    grad = torch.randn_like(found)
    assert_close(found, expected)
    (d_found,) = torch.autograd.grad(found, gate_up, grad)
    assert_close(d_found, torch.autograd.grad(expected, wide, grad.float())[0])


@pytest.mark.parametrize(
    ("name", "shape"), [("gated_norm", (24,)), ("norm_gated", (5, 24))], ids=["delta net", "Mamba"]
)
def test_heads_are_normalised_and_gated(
    name: str, shape: tuple[int, ...], device: str, dtype: torch.dtype, assert_close: Close
) -> None:
    from palestra.model.kernels import gated_norm

    x = torch.randn(3, 5, 24, device=device).requires_grad_()
    gate = torch.randn(3, 5 * 24, device=device, dtype=dtype).requires_grad_()
    wide, weight = gate.detach().float().requires_grad_(), torch.randn(shape, device=device)
    found = getattr(gated_norm, name)(x, gate, weight, EPS)
    expected = getattr(ops, name)(x, wide, weight, EPS)
    grad = torch.randn_like(found)
    assert_close(found, expected)
    d_found, d_expected = (torch.autograd.grad(found, (x, gate), grad), torch.autograd.grad(expected, (x, wide), grad))
    for a, b in zip(d_found, d_expected, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(("rows", "heads", "width"), [(3, 4, 48), (37, 20, 1300)])
def test_gates_of_a_delta_net(
    rows: int, heads: int, width: int, device: str, dtype: torch.dtype, assert_close: Close
) -> None:
    from palestra.model.kernels.delta_gates import delta_gates

    x = torch.randn(rows, width, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(2 * heads, width, device=device, dtype=dtype) * 3 / width**0.5
    neg_a, bias = -torch.rand(heads, device=device), torch.randn(heads, device=device) * 12
    found = delta_gates(x, weight, neg_a, bias)
    wide = x.detach().float().requires_grad_()
    expected = ops.delta_gates(wide, weight.float(), neg_a, bias)
    grads = [torch.randn_like(y) for y in expected]
    (d_found,) = torch.autograd.grad(found, x, grads)
    (d_expected,) = torch.autograd.grad(expected, wide, grads)
    for a, b in zip((*found, d_found), (*expected, d_expected), strict=True):
        assert_close(a, b)
    alone = [delta_gates(x[n : n + 1].detach(), weight, neg_a, bias) for n in range(3)]
    assert all(torch.equal(a[0], b[n]) for n, pair in enumerate(alone) for a, b in zip(pair, found, strict=True))


def test_heads_that_forget_slowly_keep_their_digits(device: str) -> None:
    from palestra.model.kernels.delta_gates import delta_gates

    bias = torch.linspace(-16, 24, 64, device=device)
    x, weight = (torch.zeros(rows, 64, device=device, dtype=torch.bfloat16) for rows in (1, 128))
    _, decay = delta_gates(x, weight, -torch.ones(64, device=device), bias)
    expected = -torch.nn.functional.softplus(bias.double())
    assert torch.allclose(decay[0].double(), expected, rtol=1e-4, atol=0)
