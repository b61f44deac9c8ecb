"""Recurrences by kernels agree with the plain code, and a sequence does not notice what is computed beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from palestra.model.loading.layer_spec import DeltaNetSpec, MambaSpec, RecurrenceSpec
from palestra.model.mixers.chunked_scan import ChunkLayout
from palestra.model.mixers.packed_recurrence import scan_chunks
from palestra.model.sampling.slotted_recurrence import scan_step
from tests.properties import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
DELTA_NET = DeltaNetSpec(n_key_heads=1, n_value_heads=2, key_dim=8, value_dim=24, conv_kernel=4)
MAMBA = MambaSpec(n_heads=4, head_dim=24, n_groups=2, state_size=8, conv_kernel=4)
PUBLISHED_DELTA_NET = DeltaNetSpec(n_key_heads=2, n_value_heads=4, key_dim=128, value_dim=128, conv_kernel=4)
PUBLISHED_MAMBA = MambaSpec(n_heads=4, head_dim=64, n_groups=2, state_size=128, conv_kernel=4)
CLOSE = 2e-5  # of the largest number: float32 in another order
of_each_kind = pytest.mark.parametrize("spec", [DELTA_NET, MAMBA], ids=["delta net", "Mamba"])


@dataclass(frozen=True)
class Kernels:
    steps: Callable[..., None]
    packed: Callable[..., Tensor]
    """With gradients."""


def kernels_of(spec: RecurrenceSpec) -> Kernels:
    from palestra.model.kernels import delta_rule, state_space

    if isinstance(spec, DeltaNetSpec):
        return Kernels(delta_rule.delta_steps, delta_rule.delta_rule)
    return Kernels(state_space.state_space_steps, state_space.state_space)


def rows(n: int, spec: RecurrenceSpec, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw, heads = torch.Generator().manual_seed(seed), spec.output_shape[0]
    x = torch.randn(n, spec.conv_size, generator=draw).to(HALF)
    beta = torch.rand(n, heads, generator=draw)
    decay = -0.2 * torch.rand(n, heads, generator=draw)
    return x.to(DEVICE), beta.to(DEVICE), decay.to(DEVICE)


def state_of(n: int, spec: RecurrenceSpec) -> Tensor:
    return torch.randn(n, *spec.state_shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def spans_of(lengths: list[int], slots: list[int]) -> Any:
    from palestra.model.kernels.chunk_products import Spans
    from palestra.model.mixers.kernel_recurrence import SpanArrays

    arrays = SpanArrays.of(lengths, slots)
    return Spans(torch.from_numpy(arrays.table).to(DEVICE), torch.from_numpy(arrays.chunks).to(DEVICE))


def by_steps(packed, lengths: list[int], slots: list[int], states: Tensor, spec: RecurrenceSpec) -> Tensor:
    out = torch.full((sum(lengths), *spec.output_shape), torch.nan, device=DEVICE)
    kernels_of(spec).steps(*packed, spans_of(lengths, slots), spec, states, out)
    return out


def assert_near(found: Tensor, expected: Tensor) -> None:
    error, size = (found.float() - expected.float()).abs().max(), expected.float().abs().max()
    assert error <= CLOSE * size, f"off by {error} of {size}"


@of_each_kind
@examples(8)
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_steps_go_on_from_the_states_in_their_slots(spec, lengths, seed):
    """A span without rows leaves its slot alone, as rows of a recorded step beyond the real ones do."""
    packed, states = rows(sum(lengths), spec, seed), state_of(6, spec)
    slots, now = [5, 1, 0, 3][: len(lengths)], states.clone()
    out = by_steps(packed, lengths, slots, now, spec)
    begin = 0
    for length, slot in zip(lengths, slots, strict=True):
        state = states[slot : slot + 1]
        for i in range(begin, begin + length):
            x, beta, decay = (part[i : i + 1] for part in packed)
            expected, state = scan_step(x, beta, decay, state, spec)
            assert_near(out[i : i + 1], expected)
        if length:
            assert_near(now[slot], state[0])
        else:
            assert torch.equal(now[slot], states[slot])
        begin += length


@pytest.mark.parametrize(
    ("lengths", "spec"),
    [
        pytest.param([70, 3], DELTA_NET, id="delta net"),
        pytest.param([70, 3], MAMBA, id="Mamba"),
        pytest.param([66], PUBLISHED_DELTA_NET, marks=pytest.mark.slow, id="delta net, published heads"),
        pytest.param([66], PUBLISHED_MAMBA, marks=pytest.mark.slow, id="Mamba, published heads"),
    ],
)
def test_gradients_are_those_of_the_plain_code(lengths, spec):
    leaves = [x.requires_grad_() for x in rows(sum(lengths), spec)]
    wide = [x.detach().float().requires_grad_() for x in leaves]
    found = kernels_of(spec).packed(*leaves, spans_of(lengths, [-1] * len(lengths)), spec)
    expected, _ = scan_chunks(wide[0], wide[1], wide[2], ChunkLayout(lengths, DEVICE), spec)
    assert_near(found, expected)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    ours, truth = torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, wide, grad)
    half = torch.finfo(HALF).eps
    for a, b, tolerance in zip(ours, truth, (half, 2e-5, 2e-5), strict=True):
        assert torch.linalg.norm(a.float() - b) < tolerance * torch.linalg.norm(b)


@of_each_kind
@examples(6)
@given(
    before=st.lists(st.integers(1, 5), max_size=2),
    length=st.integers(1, 9),
    after=st.lists(st.integers(1, 5), max_size=1),
)
def test_a_sequence_gets_the_same_bits_in_any_batch(spec, before, length, after):
    lengths, states = [*before, length, *after], state_of(8, spec)
    packed, mine = rows(sum(lengths), spec, 7), len(before)
    own = slice(sum(before), sum(before) + length)
    together, now = states.clone(), states.clone()
    found = by_steps(packed, lengths, list(range(len(lengths))), together, spec)[own]
    assert torch.equal(by_steps(tuple(x[own] for x in packed), [length], [mine], now, spec), found)
    assert torch.equal(now[mine], together[mine])


@of_each_kind
@examples(6)
@given(cuts=st.lists(st.integers(1, 7), max_size=7, unique=True))
def test_a_prompt_cut_anywhere_and_decoded_on_has_the_trainers_bits(spec, cuts):
    """From the first position on, in one pass that keeps states for its gradient, and in parts that end at `cuts`."""
    n = 8
    packed, state = rows(n, spec), torch.zeros(1, *spec.state_shape, device=DEVICE)
    leaves = [x.clone().requires_grad_() for x in packed]
    trained = kernels_of(spec).packed(*leaves, spans_of([n], [-1]), spec)
    ends = [0, *sorted(cuts), n]
    parts = [slice(a, b) for a, b in pairwise(ends)]
    found = [by_steps(tuple(x[p] for x in packed), [p.stop - p.start], [0], state, spec) for p in parts]
    assert torch.equal(torch.cat(found), trained.detach())


@pytest.mark.slow
@of_each_kind
def test_gradients_of_a_sequence_are_its_own(spec):
    def gradients(packed, lengths: list[int], grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in packed]
        out = kernels_of(spec).packed(*leaves, spans_of(lengths, [-1] * len(lengths)), spec)
        return torch.autograd.grad(out, leaves, grad)

    lengths, packed = [5, 67], rows(72, spec)
    grad = torch.randn(72, *spec.output_shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    together = gradients(packed, lengths, grad)
    alone = gradients(tuple(x[5:] for x in packed), [67], grad[5:])
    assert all(torch.equal(a[5:], b) for a, b in zip(together, alone, strict=True))
