"""Mamba-2's state space: chunks and steps are one recurrence, and packed sequences never meet."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.model import TrainItem, encode
from palestra.model.loading.layer_spec import MambaSpec
from palestra.model.mixers.chunked_scan import CHUNK, ChunkLayout
from palestra.model.mixers.state_space import state_space, state_space_step
from palestra.types import Datum

SPEC = MambaSpec(n_heads=4, head_dim=6, n_groups=2, state_size=8, conv_kernel=4)


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    xbc = torch.randn(n, SPEC.conv_size, generator=draw)
    dt = torch.rand(n, SPEC.n_heads, generator=draw)
    return xbc, dt, -0.2 * torch.rand(n, SPEC.n_heads, generator=draw)


def by_definition(xbc: Tensor, dt: Tensor, decay: Tensor) -> Tensor:
    """S <- e^decay S + dt x B^T, y = S C: one position, one head at a time."""
    x, b, c = xbc.split([SPEC.inner_size, 16, 16], 1)
    x, b, c = x.unflatten(1, (4, 6)), b.unflatten(1, (2, 8)), c.unflatten(1, (2, 8))
    states, out = [torch.zeros(6, 8) for _ in range(4)], []
    for t in range(len(x)):
        for j in range(4):
            states[j] = decay[t, j].exp() * states[j] + dt[t, j] * torch.outer(x[t, j], b[t, j // 2])
        out.append(torch.stack([states[j] @ c[t, j // 2] for j in range(4)]))
    return torch.stack(out)


def by_steps(xbc: Tensor, dt: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    state, out = torch.zeros(1, *SPEC.state_shape), []
    for i in range(len(xbc)):
        part, state = state_space_step(xbc[i : i + 1], dt[i : i + 1], decay[i : i + 1], state, SPEC)
        out.append(part)
    return torch.cat(out), state


def test_steps_are_the_definition():
    packed = rows(20)
    assert (by_steps(*packed)[0] - by_definition(*packed)).abs().max() < 1e-5


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=5))
def test_packed_chunks_are_the_steps_of_each_sequence(lengths):
    packed = rows(sum(lengths))
    out, last = state_space(*packed, ChunkLayout(lengths, "cpu"), SPEC)
    parts = zip(*(x.split(lengths) for x in packed), strict=True)
    for sequence, ours, state in zip(parts, out.split(lengths), last, strict=True):
        truth, truth_state = by_steps(*sequence)
        assert (ours - truth).abs().max() < 2e-5
        assert (state - truth_state[0]).abs().max() < 1e-5


def test_sequence_cut_on_the_grid_has_the_same_bits():
    packed = rows(200)
    whole, last = state_space(*packed, ChunkLayout([200], "cpu"), SPEC)
    state, parts = torch.zeros(1, *SPEC.state_shape), []
    for start, end in ((0, CHUNK), (CHUNK, 3 * CHUNK), (3 * CHUNK, 200)):
        xbc, dt, decay = (x[start:end] for x in packed)
        out, state = state_space(xbc, dt, decay, ChunkLayout([end - start], "cpu"), SPEC, state)
        parts.append(out)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, last)


def test_gradients_are_those_of_the_steps():
    lengths = [70, 3, 130]
    leaves = [x.requires_grad_() for x in rows(sum(lengths))]
    weight = torch.randn(sum(lengths), *SPEC.output_shape, generator=torch.Generator().manual_seed(1))
    out, _ = state_space(leaves[0], leaves[1], leaves[2], ChunkLayout(lengths, "cpu"), SPEC)
    ours = torch.autograd.grad((out * weight).sum(), leaves)
    truth = torch.cat([by_steps(*parts)[0] for parts in zip(*(x.split(lengths) for x in leaves), strict=True)])
    for a, b in zip(ours, torch.autograd.grad((truth * weight).sum(), leaves), strict=True):
        assert torch.linalg.norm(a - b) < 1e-5 * torch.linalg.norm(b)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 5e-5), ("bfloat16", 0.1)])
def test_sampled_logprobs_are_the_trainers_within_the_distance_of_the_two_forms(get_bench, dtype, bound):
    bench = get_bench("nemotron_h", dtype=dtype)
    prompt = bench.tokens(100)
    request = bench.request(prompt, max_tokens=60, raw_logprobs=True, record_routing=True)
    (sampled,) = bench.sampler().generate([request])[0].sequences
    tokens = prompt + sampled.tokens
    datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(torch.tensor(tokens[1:]).numpy()))
    datum = msgspec.structs.replace(datum, routing=sampled.routing)  # rounding would send some tokens to other experts
    trained = bench.trainer.forward([TrainItem(None, datum)])[0].logprobs[len(prompt) - 1 :]
    off = abs(torch.tensor(sampled.raw_logprobs) - torch.from_numpy(trained))
    assert off.max() < bound
