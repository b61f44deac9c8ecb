"""The delta rule: chunks and steps are one recurrence, and packed sequences never meet."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.model import TrainItem, encode
from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.mixers.causal_conv import ConvLayout, causal_conv
from palestra.model.mixers.chunked_scan import CHUNK, ChunkLayout
from palestra.model.mixers.delta_rule import delta_rule, delta_step
from palestra.types import Datum

SPEC = DeltaNetSpec(n_key_heads=2, n_value_heads=4, key_dim=8, value_dim=6, conv_kernel=4)


def rows(n: int, seed: int = 0, spec: DeltaNetSpec = SPEC) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    qkv = torch.randn(n, spec.conv_size, generator=draw)
    beta = torch.rand(n, spec.n_value_heads, generator=draw)
    return qkv, beta, -0.2 * torch.rand(n, spec.n_value_heads, generator=draw)


def by_steps(qkv: Tensor, beta: Tensor, decay: Tensor, spec: DeltaNetSpec = SPEC) -> tuple[Tensor, Tensor]:
    state, out = torch.zeros(1, *spec.state_shape, dtype=qkv.dtype), []
    for i in range(len(qkv)):
        part, state = delta_step(qkv[i : i + 1], beta[i : i + 1], decay[i : i + 1], state, spec)
        out.append(part)
    return torch.cat(out), state


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 3 * CHUNK), min_size=1, max_size=5))
def test_packed_chunks_are_the_steps_of_each_sequence(lengths):
    packed = rows(sum(lengths))
    out, last = delta_rule(*packed, ChunkLayout(lengths, "cpu"), SPEC)
    parts = zip(*(x.split(lengths) for x in packed), strict=True)
    for (qkv, beta, decay), ours, state in zip(parts, out.split(lengths), last, strict=True):
        truth, truth_state = by_steps(qkv, beta, decay)
        assert (ours - truth).abs().max() < 1e-5
        assert (state - truth_state[0]).abs().max() < 1e-5


def test_sequence_cut_on_the_grid_has_the_same_bits():
    packed = rows(200)
    whole, last = delta_rule(*packed, ChunkLayout([200], "cpu"), SPEC)
    state, parts = torch.zeros(1, *SPEC.state_shape), []
    for start, end in ((0, CHUNK), (CHUNK, 3 * CHUNK), (3 * CHUNK, 200)):
        qkv, beta, decay = (x[start:end] for x in packed)
        out, state = delta_rule(qkv, beta, decay, ChunkLayout([end - start], "cpu"), SPEC, state)
        parts.append(out)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, last)


def test_gradients_are_those_of_the_steps():
    lengths = [70, 3, 130]
    leaves = [x.requires_grad_() for x in rows(sum(lengths))]
    weight = torch.randn(sum(lengths), SPEC.n_value_heads, SPEC.value_dim, generator=torch.Generator().manual_seed(1))
    out, _ = delta_rule(leaves[0], leaves[1], leaves[2], ChunkLayout(lengths, "cpu"), SPEC)
    ours = torch.autograd.grad((out * weight).sum(), leaves)
    truth = torch.cat([by_steps(*parts)[0] for parts in zip(*(x.split(lengths) for x in leaves), strict=True)])
    for a, b in zip(ours, torch.autograd.grad((truth * weight).sum(), leaves), strict=True):
        assert torch.linalg.norm(a - b) < 1e-5 * torch.linalg.norm(b)


def test_backward_keeps_the_inputs_and_a_state_per_chunk():
    lengths, kept = [70, 3, 130], []
    leaves = [x.requires_grad_() for x in rows(sum(lengths))]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        delta_rule(leaves[0], leaves[1], leaves[2], ChunkLayout(lengths, "cpu"), SPEC)
    states = (2 + 1 + 3) * SPEC.n_value_heads * SPEC.key_dim * SPEC.value_dim
    assert sum(kept) == sum(x.numel() for x in leaves) + states


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_convolution_goes_on_from_its_last_inputs(cut):
    x, weight = torch.randn(12, 5), torch.randn(4, 5)
    whole, after = causal_conv(x, weight, ConvLayout([12], 3, "cpu"))
    first, state = causal_conv(x[:cut], weight, ConvLayout([cut], 3, "cpu"))
    second, end = causal_conv(x[cut:], weight, ConvLayout([12 - cut], 3, "cpu"), state)
    assert (torch.cat([first, second]) - whole).abs().max() < 1e-6  # a CPU's silu rounds by where a row stands
    assert torch.equal(end, after)


def test_convolutions_of_packed_sequences_do_not_meet():
    x, weight = torch.randn(9, 5), torch.randn(4, 5)
    packed, _ = causal_conv(x, weight, ConvLayout([2, 6, 1], 3, "cpu"))
    alone = [causal_conv(part, weight, ConvLayout([len(part)], 3, "cpu"))[0] for part in x.split([2, 6, 1])]
    assert (packed - torch.cat(alone)).abs().max() < 1e-6


def test_packed_sequences_give_what_each_gives_alone():
    lengths = [70, 3, 130]
    packed = rows(sum(lengths))
    out, _ = delta_rule(*packed, ChunkLayout(lengths, "cpu"), SPEC)
    for ours, parts in zip(out.split(lengths), zip(*(x.split(lengths) for x in packed), strict=True), strict=True):
        alone, _ = delta_rule(*parts, ChunkLayout([len(parts[0])], "cpu"), SPEC)
        assert (ours - alone).abs().max() < 1e-6


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 5e-5), ("bfloat16", 0.1)])
def test_sampled_logprobs_are_the_trainers_within_the_distance_of_the_two_forms(get_bench, dtype, bound):
    """docs/design/model-families.md states what was measured."""
    bench = get_bench("qwen3_5", dtype=dtype)
    prompt = bench.tokens(100)
    request = bench.request(prompt, max_tokens=60, raw_logprobs=True)
    (sampled,) = bench.sampler().generate([request])[0].sequences
    tokens = prompt + sampled.tokens
    datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(torch.tensor(tokens[1:]).numpy()))
    trained = bench.trainer.forward([TrainItem(None, datum)])[0].logprobs[len(prompt) - 1 :]
    off = abs(torch.tensor(sampled.raw_logprobs) - torch.from_numpy(trained))
    assert off.max() < bound
