"""Tokens drawn by kernels: each rule against a plain version of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.model import kernels
from palestra.model.draw_noise import log_exponentials, noise_keys
from palestra.model.sampling.logit_filters import DrawRow
from palestra.model.sampling.token_draws import draw
from palestra.types import SamplingParams
from tests.properties import examples

pytestmark = pytest.mark.usefixtures("with_kernels")
VOCAB = 2500  # more than a block of the vocabulary


def row(seed: int = 0, **params) -> DrawRow:
    return DrawRow(SamplingParams(**params), seed, 0, (1, 2), [])


@pytest.fixture
def logits(device: str, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    made[3, 500:] = -math.inf
    made[4, :2400] = -math.inf
    return made.to(device, dtype)


def test_the_kernel_draws_what_plain_code_draws(logits: torch.Tensor, device: str) -> None:
    from palestra.model.kernels.draw import draw_tokens

    temperatures = torch.tensor([1.0, 0.7, 1.3, 1.0, 2.0, 1e-6], device=device)
    for seed in range(8):
        keys = torch.from_numpy(noise_keys([(seed, i, 3) for i in range(6)])).to(device)
        tokens = draw_tokens(logits, temperatures, keys)
        scores = logits.float() / temperatures[:, None] - log_exponentials(keys, VOCAB)
        found, best = scores.gather(1, tokens[:, None])[:, 0], scores.amax(-1)
        torch.testing.assert_close(found, best, rtol=1e-6, atol=1e-5)


def test_reported_logprobs_and_the_likeliest(logits: torch.Tensor) -> None:
    rows = [row(i, temperature=t) for i, t in enumerate((1.0, 0.0, 0.5, 1.0, 2.0, 1.0))]
    rows[2].raw = True
    found = draw(logits, rows, top=4).read()
    for i, one in enumerate(rows):
        scale = one.params.temperature or 1.0
        truth, raw = (torch.log_softmax(logits[i].double() / t, -1) for t in (scale, 1.0 if one.raw else scale))
        assert found.logprobs[i] == pytest.approx(truth[found.tokens[i]].item(), abs=1e-4)
        assert found.raw[i] == pytest.approx(raw[found.tokens[i]].item(), abs=1e-4)
        assert found.top_logprobs[i] == pytest.approx(raw.topk(4).values.tolist(), abs=1e-4)
    assert found.tokens[1] == logits[1].argmax().item()


def test_a_row_draws_the_same_beside_rows_with_filters_and_penalties(logits: torch.Tensor) -> None:
    rows = [row(i) for i in range(6)]
    alone = draw(logits, rows).read()
    rows[1], rows[4] = row(1, top_p=0.9, temperature=0.8), row(4, logit_bias={7: 3.0}, top_k=5)
    mixed = draw(logits, rows).read()
    for i in (0, 2, 3, 5):
        assert (mixed.tokens[i], mixed.logprobs[i]) == (alone.tokens[i], alone.logprobs[i])


@examples(20)
@given(
    values=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    top_p=st.floats(0.01, 0.999),
    hidden=st.integers(0, 3),
)
def test_the_nucleus_is_the_smallest_set_that_is_likely_enough(values: list[float], top_p: float, hidden: int) -> None:
    from palestra.model.kernels.draw import nucleus

    assert kernels.can_run_on("cuda" if torch.cuda.is_available() else "cpu")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.tensor([values + [-math.inf] * hidden, values + [-math.inf] * hidden], device=device)
    threshold, none = nucleus(logits, torch.tensor([[top_p], [1.0]], device=device)).flatten().tolist()
    assert none == -math.inf
    assert threshold in np.array(values, np.float32).tolist()
    p = torch.softmax(torch.tensor(values, dtype=torch.float64), -1)
    kept = p[torch.tensor(values) >= threshold].sum().item()
    above = p[torch.tensor(values) > threshold].sum().item()
    assert kept >= top_p - 1e-5
    assert above < top_p + 1e-5


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_a_row_that_is_not_a_number_ends_and_leaves_the_others_alone(logits: torch.Tensor, value: float) -> None:
    rows = [row(i, top_p=0.9) for i in range(3)]
    before = draw(logits[2:5], rows).read()
    ruined = logits[2:5].clone()
    ruined[1, 5] = value
    after = draw(ruined, rows).read()
    for i in (0, 2):
        assert (after.tokens[i], after.logprobs[i]) == (before.tokens[i], before.logprobs[i])
    assert 0 <= after.tokens[1] < VOCAB


def test_a_top_p_of_nearly_nothing_leaves_the_best(logits: torch.Tensor) -> None:
    rows = [row(i, top_p=1e-50) for i in range(2)]
    assert draw(logits[2:4], rows).read().tokens == logits[2:4].argmax(-1).tolist()
