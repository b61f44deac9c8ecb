"""Losses of preferences and their slopes, beside the formulas of the papers and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from palestra.config.train import DpoConfig, PreferenceLoss
from palestra.training.batches.preference_losses import AnswerScore, compare, estimate_kl, judge
from tests.properties import examples

L = PreferenceLoss


def config(loss: PreferenceLoss, **settings: float) -> DpoConfig:
    return DpoConfig.model_validate({"kind": "dpo", "data": "pairs.jsonl", "steps": 1, "loss": loss, **settings})


def plain(loss: PreferenceLoss, s: list[torch.Tensor], ref: list[float], n: list[int]) -> torch.Tensor:
    """As the papers write them, with their defaults."""
    r = [s[0] - ref[0], s[1] - ref[1]]
    match loss:
        case L.DPO:
            return -logsigmoid(0.1 * (r[0] - r[1]))
        case L.IPO:
            return (r[0] / n[0] - r[1] / n[1] - 1 / (2 * 0.1)) ** 2
        case L.SIMPO:
            return -logsigmoid(2.0 * (s[0] / n[0] - s[1] / n[1]) - 1.0)
        case _:
            odds = [torch.log(torch.exp(one / k) / (1 - torch.exp(one / k))) for one, k in zip(s, n, strict=True)]
            return -s[0] / n[0] - 0.1 * logsigmoid(odds[0] - odds[1])


answers = st.tuples(st.floats(-8, -0.02), st.integers(1, 60), st.floats(-8, -0.02))
"""Mean logprob, tokens, mean logprob under the reference."""


@pytest.mark.parametrize("loss", [L.DPO, L.IPO, L.SIMPO, L.ORPO])
@given(chosen=answers, rejected=answers)
@examples(40)
def test_pairs_have_the_loss_and_the_slopes_of_the_formula(loss, chosen, rejected):
    scores = [AnswerScore(mean * n, n, other * n) for mean, n, other in (chosen, rejected)]
    s = [torch.tensor(one.logprob, dtype=torch.float64, requires_grad=True) for one in scores]
    expected = plain(loss, s, [one.reference for one in scores], [one.tokens for one in scores])
    expected.backward()
    found = compare(config(loss), *scores)
    slopes = [one.grad.item() for one in s if one.grad is not None]
    assert found.value == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)
    assert (found.by_chosen, found.by_rejected) == (
        pytest.approx(slopes[0], rel=1e-6, abs=1e-9),
        pytest.approx(slopes[1], rel=1e-6, abs=1e-9),
    )
    assert found.by_chosen <= 0 <= found.by_rejected or loss is L.IPO


@given(answer=answers, kl=st.floats(0, 20), is_desirable=st.booleans())
@examples(60)
def test_a_labelled_answer_has_the_loss_and_the_slope_of_the_formula(answer, kl, is_desirable):
    mean, n, other = answer
    score = AnswerScore(mean * n, n, other * n)
    s = torch.tensor(score.logprob, dtype=torch.float64, requires_grad=True)
    distance = 0.1 * (s - score.reference - kl)
    weight = 1.5 if is_desirable else 0.5
    expected = weight * (1 - torch.sigmoid(distance if is_desirable else -distance))
    (slope,) = torch.autograd.grad(expected, s)
    settings = config(L.KTO, desirable_weight=1.5, undesirable_weight=0.5)
    found = judge(settings, score, is_desirable=is_desirable, kl=kl)
    assert found.value == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)
    assert found.by_answer == pytest.approx(slope.item(), rel=1e-6, abs=1e-9)
    assert found.reward == pytest.approx(0.1 * (score.logprob - score.reference))


def test_the_kl_is_a_mean_of_at_least_zero():
    assert estimate_kl([]) == 0.0
    assert estimate_kl([AnswerScore(-1.0, 2, -4.0), AnswerScore(-2.0, 2, -1.0)]) == 1.0
    assert estimate_kl([AnswerScore(-4.0, 2, -1.0)]) == 0.0


@given(st.sampled_from([L.DPO, L.IPO, L.SIMPO, L.ORPO]), st.floats(-1e6, 0), st.floats(-1e6, 0))
@examples(60)
def test_no_logprob_is_too_large(loss, chosen, rejected):
    found = compare(config(loss), AnswerScore(chosen, 7), AnswerScore(rejected, 3))
    assert all(map(math.isfinite, found))
