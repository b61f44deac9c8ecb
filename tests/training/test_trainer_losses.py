"""Losses of the trainer's process, beside their formulas written plainly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.algorithm import AlgorithmConfig
from palestra.training.custom_functions import FunctionError, LossSequence, check_functions, custom_loss
from palestra.training.trainer_losses import gmpo, sapo
from tests.properties import examples
from tests.training.records import make_config

TOKENS = st.lists(st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.booleans()), min_size=1, max_size=6)
SEQUENCES = st.lists(st.tuples(TOKENS, st.sampled_from([-1.5, -0.25, 0.5, 2.0])), min_size=1, max_size=4)


def laid_out(rows) -> tuple[list[torch.Tensor], list[LossSequence]]:
    logprobs, sequences = [], []
    for tokens, advantage in rows:
        own, old, mask = (torch.tensor(one, dtype=torch.float64) for one in zip(*tokens, strict=True))
        sampled = mask.bool()
        logprobs.append(own.requires_grad_())
        sequences.append(LossSequence(torch.where(sampled, old, 0.0), sampled * advantage, sampled))
    return logprobs, sequences


@given(SEQUENCES)
@examples(40)
def test_sapo_is_its_formula(rows):
    expected = 0.0
    for tokens, advantage in rows:
        tau = 1.0 if advantage > 0 else 1.05
        for own, old, sampled in tokens:
            if sampled:
                expected -= advantage * 4 / tau / (1 + math.exp(-tau * (math.exp(own - old) - 1)))
    assert sapo(*laid_out(rows))[0].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(SEQUENCES)
@examples(40)
def test_gmpo_is_its_formula(rows):
    expected = 0.0
    for tokens, advantage in rows:
        moves = [own - old for own, old, sampled in tokens if sampled]
        if not moves:
            continue
        kept = [min(move, 0.4) if advantage > 0 else max(move, -0.4) for move in moves]
        mean = math.exp(sum(kept) / len(kept))
        expected -= advantage * len(moves) * mean
    assert gmpo(*laid_out(rows))[0].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("loss", [sapo, gmpo])
def test_where_nothing_has_moved_the_gradient_is_that_of_importance_sampling(loss):
    tokens = [(-0.5, -0.5, True), (-1.0, -1.0, False), (-2.0, -2.0, True)]
    logprobs, sequences = laid_out([(tokens, 2.0), (tokens, -0.5)])
    for found, one in zip(torch.autograd.grad(loss(logprobs, sequences)[0], logprobs), sequences, strict=True):
        torch.testing.assert_close(found, -one.advantages, check_dtype=False)


@pytest.mark.parametrize("name", ["sapo", "gmpo"])
def test_a_config_names_them_and_their_settings(name):
    setting = {"sapo": "tau_negative", "gmpo": "clip_high"}[name]
    config = make_config(algorithm={"loss": name, "loss_config": {setting: 2.0}}).algorithm
    check_functions(config)
    assert custom_loss(config) is not None
    wrong = AlgorithmConfig.model_validate({"loss": name, "loss_config": {"nonsense": 1.0}})
    with pytest.raises(FunctionError, match=f"trainer_losses:{name}.*nonsense"):
        check_functions(wrong)
