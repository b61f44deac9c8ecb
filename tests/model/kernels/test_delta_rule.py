"""The delta rule by kernels agrees with the plain code, and a sequence does not notice what is computed beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.mixers import delta_rule as plain
from palestra.model.mixers.chunked_scan import CHUNK, ChunkLayout
from tests.properties import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
SMALL = DeltaNetSpec(n_key_heads=1, n_value_heads=2, key_dim=8, value_dim=24, conv_kernel=4)
PUBLISHED = DeltaNetSpec(n_key_heads=2, n_value_heads=4, key_dim=128, value_dim=128, conv_kernel=4)
CLOSE = 2e-5  # of the largest number: float32 in another order


def rows(n: int, spec: DeltaNetSpec, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    qkv = torch.randn(n, spec.conv_size, generator=draw).to(HALF)
    beta = torch.rand(n, spec.n_value_heads, generator=draw)
    decay = -0.2 * torch.rand(n, spec.n_value_heads, generator=draw)
    return qkv.to(DEVICE), beta.to(DEVICE), decay.to(DEVICE)


def state_of(n: int, spec: DeltaNetSpec) -> Tensor:
    return torch.randn(n, *spec.state_shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def spans_of(lengths: list[int], slots: list[int]):
    from palestra.model.kernels.delta_rule import Spans
    from palestra.model.mixers.kernel_recurrence import SpanArrays

    arrays = SpanArrays.of(lengths, slots, [True] * len(lengths))
    return Spans(torch.from_numpy(arrays.chunked).to(DEVICE), torch.from_numpy(arrays.chunks).to(DEVICE))


def by_chunks(packed, lengths: list[int], slots: list[int], states: Tensor, spec: DeltaNetSpec = SMALL) -> Tensor:
    from palestra.model.kernels.delta_rule import delta_chunks

    out = torch.full((sum(lengths), spec.n_value_heads, spec.value_dim), torch.nan, device=DEVICE)
    delta_chunks(*packed, spans_of(lengths, slots), spec, states, out)
    return out


def by_steps(packed, lengths: list[int], slots: list[int], states: Tensor, spec: DeltaNetSpec = SMALL) -> Tensor:
    from palestra.model.kernels.delta_rule import delta_steps

    out = torch.full((sum(lengths), spec.n_value_heads, spec.value_dim), torch.nan, device=DEVICE)
    delta_steps(*packed, spans_of(lengths, slots), spec, states, out)
    return out


def assert_near(found: Tensor, expected: Tensor) -> None:
    error, size = (found.float() - expected.float()).abs().max(), expected.float().abs().max()
    assert error <= CLOSE * size, f"off by {error} of {size}"


@examples(8)
@given(lengths=st.lists(st.integers(1, 2 * CHUNK + 5), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_chunks_go_on_from_the_states_in_their_slots(lengths, seed):
    packed, states = rows(sum(lengths), SMALL, seed), state_of(5, SMALL)
    slots = [3, 0, 4][: len(lengths)]
    expected, last = plain.delta_rule(*packed, ChunkLayout(lengths, DEVICE), SMALL, states[slots])
    now = states.clone()
    assert_near(by_chunks(packed, lengths, slots, now), expected)
    assert_near(now[slots], last)
    others = [slot for slot in range(5) if slot not in slots]
    assert torch.equal(now[others], states[others])


@examples(8)
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_steps_go_on_from_the_states_in_their_slots(lengths, seed):
    """A span without rows leaves its slot alone, as rows of a recorded step beyond the real ones do."""
    packed, states = rows(sum(lengths), SMALL, seed), state_of(6, SMALL)
    slots, now = [5, 1, 0, 3][: len(lengths)], states.clone()
    out = by_steps(packed, lengths, slots, now)
    begin = 0
    for length, slot in zip(lengths, slots, strict=True):
        state = states[slot : slot + 1]
        for i in range(begin, begin + length):
            expected, state = plain.delta_step(*(x[i : i + 1] for x in packed), state, SMALL)
            assert_near(out[i : i + 1], expected)
        if length:
            assert_near(now[slot], state[0])
        else:
            assert torch.equal(now[slot], states[slot])
        begin += length


@pytest.mark.parametrize(
    ("lengths", "spec"),
    [
        pytest.param([70, 3], SMALL, id="small"),
        pytest.param([66], PUBLISHED, marks=pytest.mark.slow, id="published heads"),
    ],
)
def test_gradients_are_those_of_the_plain_code(lengths, spec):
    from palestra.model.kernels.delta_rule import delta_rule

    leaves = [x.requires_grad_() for x in rows(sum(lengths), spec)]
    wide = [x.detach().float().requires_grad_() for x in leaves]
    found = delta_rule(leaves[0], leaves[1], leaves[2], spans_of(lengths, [0] * len(lengths)), spec)
    expected, _ = plain.delta_rule(wide[0], wide[1], wide[2], ChunkLayout(lengths, DEVICE), spec)
    assert_near(found, expected)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    ours, truth = torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, wide, grad)
    half = torch.finfo(HALF).eps
    for a, b, tolerance in zip(ours, truth, (half, 2e-5, 2e-5), strict=True):
        assert torch.linalg.norm(a.float() - b) < tolerance * torch.linalg.norm(b)


@examples(6)
@given(
    before=st.lists(st.integers(1, 70), max_size=2),
    length=st.integers(1, CHUNK + 9),
    after=st.lists(st.integers(1, 70), max_size=1),
    form=st.sampled_from((by_chunks, by_steps)),
)
def test_a_sequence_gets_the_same_bits_in_any_batch(before, length, after, form):
    if form is by_steps:
        length = min(length, 5)
        before, after = [1] * len(before), [1] * len(after)
    lengths, states = [*before, length, *after], state_of(8, SMALL)
    packed, mine = rows(sum(lengths), SMALL, 7), len(before)
    own = slice(sum(before), sum(before) + length)
    together, now = states.clone(), states.clone()
    found = form(packed, lengths, list(range(len(lengths))), together)[own]
    assert torch.equal(form(tuple(x[own] for x in packed), [length], [mine], now), found)
    assert torch.equal(now[mine], together[mine])


def test_a_sequence_cut_on_the_grid_has_the_same_bits():
    packed, whole, cut = rows(100, SMALL), state_of(1, SMALL), state_of(1, SMALL)
    expected = by_chunks(packed, [100], [0], whole)
    parts = [slice(0, CHUNK), slice(CHUNK, 100)]
    found = [by_chunks(tuple(x[p] for x in packed), [p.stop - p.start], [0], cut) for p in parts]
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(cut, whole)


@pytest.mark.slow
def test_gradients_of_a_sequence_are_its_own():
    from palestra.model.kernels.delta_rule import delta_rule

    def gradients(packed, lengths: list[int], grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in packed]
        out = delta_rule(leaves[0], leaves[1], leaves[2], spans_of(lengths, [0] * len(lengths)), SMALL)
        return torch.autograd.grad(out, leaves, grad)

    lengths, packed = [5, 67], rows(72, SMALL)
    grad = torch.randn(72, SMALL.n_value_heads, SMALL.value_dim, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    together = gradients(packed, lengths, grad)
    alone = gradients(tuple(x[5:] for x in packed), [67], grad[5:])
    assert all(torch.equal(a[5:], b) for a, b in zip(together, alone, strict=True))
