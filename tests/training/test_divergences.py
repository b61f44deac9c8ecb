"""Divergences of whole distributions, and their gradients, compared with plain ones over the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from palestra.config.distillation import DistillationConfig
from palestra.training.divergences import DivergenceLoss
from palestra.training.tinker_policy import tensor_of, wide_datum
from palestra.types.rollouts import TrainSequence
from palestra.types.sampling import TopLogprobs

VOCAB, PLACES = 11, 3
KINDS = ["forward_kl", "reverse_kl", "jsd"]


def settings(loss: str, top_k: Any = "all", **more: Any) -> DistillationConfig:
    return DistillationConfig.model_validate({"loss": loss, "top_k": top_k, **more})


def logits(seed: int) -> torch.Tensor:
    return torch.randn(PLACES, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


def plain(kind: str, p: torch.Tensor, q: torch.Tensor, share: float) -> torch.Tensor:
    """By the definitions of the textbook, of probabilities in rows."""
    if kind == "forward_kl":
        return torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1)
    if kind == "reverse_kl":
        return torch.nn.functional.kl_div(p.log(), q, reduction="none").sum(-1)
    m = share * p + (1 - share) * q
    return share * (p * (p / m).log()).sum(-1) + (1 - share) * (q * (q / m).log()).sum(-1)


def coarse(probabilities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    kept = probabilities.gather(1, ids)
    return torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], -1)


def a_sequence(teacher: torch.Tensor, ids: torch.Tensor, weights: list[float]) -> TrainSequence:
    found = teacher.gather(1, ids)
    top = [TopLogprobs(tuple(i), tuple(v)) for i, v in zip(ids.tolist(), found.tolist(), strict=True)]
    size = 2 + PLACES
    return TrainSequence(
        tokens=list(range(size)),
        mask=[False, False, *[True] * PLACES],
        logprobs=[0.0] * size,
        advantages=[0.0, 0.0, *weights],
        teacher_top=top,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", ["all", 4])
def test_loss_and_gradient_are_those_of_the_definition(kind: str, k: Any):
    share, weights = 0.3, [0.5, 1.0, 2.0]
    teacher, student = logits(1).log_softmax(-1), logits(2).requires_grad_()
    ids = teacher.topk(VOCAB if k == "all" else k, -1).indices
    own = student.log_softmax(-1)
    listed = own.gather(1, ids)
    loss = DivergenceLoss(settings(kind, k, jsd_weight=share))
    found = loss.differentiate([a_sequence(teacher, ids, weights)], [listed.detach().tolist()])

    p, q = teacher.exp(), own.exp()
    both = (p, q) if k == "all" else (coarse(p, ids), coarse(q, ids))
    values = plain(kind, *both, share)
    expected = (torch.tensor(weights) * values).sum()
    assert found.loss == pytest.approx(expected.item(), abs=1e-6)
    assert found.mean == pytest.approx(values.mean().item(), abs=1e-6)
    (by_logits,) = torch.autograd.grad(expected, student, retain_graph=True)
    (ours,) = torch.autograd.grad((torch.tensor(found.gradients[0]) * listed).sum(), student)
    assert torch.allclose(ours, by_logits, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_have_nothing_to_learn(kind: str):
    teacher = logits(1).log_softmax(-1)
    ids = teacher.topk(4, -1).indices
    found = DivergenceLoss(settings(kind, 4)).differentiate(
        [a_sequence(teacher, ids, [1.0] * PLACES)], [teacher.gather(1, ids).tolist()]
    )
    assert found.loss == pytest.approx(0.0, abs=1e-9)
    # The derivatives shift all logprobs alike, which no student can do: the gradient by its logits is 0.
    student = logits(1).requires_grad_()
    own = student.log_softmax(-1).gather(1, ids)
    (by_logits,) = torch.autograd.grad((torch.tensor(found.gradients[0]) * own).sum(), student)
    assert torch.allclose(by_logits, torch.zeros_like(by_logits), atol=1e-9)


def test_a_distribution_whose_rest_is_rounding_stays_finite():
    teacher = torch.tensor([[0.6, 0.4 - 1e-9]] * PLACES, dtype=torch.float64).log()
    student = torch.tensor([[0.5, 0.5 + 1e-9]] * PLACES, dtype=torch.float64).log()
    ids = torch.tensor([[0, 1]] * PLACES)
    for kind in KINDS:
        loss = DivergenceLoss(settings(kind, 2))
        found = loss.differentiate([a_sequence(teacher, ids, [1.0] * PLACES)], [student.tolist()])
        assert np.abs(found.gradients[0]).max() < 2


def test_a_datum_has_the_teachers_tokens_where_one_was_sampled():
    teacher = logits(1).log_softmax(-1)
    ids = teacher.topk(2, -1).indices
    sequence = a_sequence(teacher, ids, [1.0] * PLACES)
    gradient = [[0.5, -0.25]] * PLACES
    datum = wide_datum(sequence, gradient)
    targets, weights = (datum.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", "weights"))
    assert targets.tolist() == [[1, 0, 0], *([token, *own] for token, own in zip([2, 3, 4], ids.tolist(), strict=True))]
    assert weights.tolist() == [[0, 0, 0], *[[0, -0.5, 0.25]] * PLACES]
    assert "weights" not in wide_datum(sequence).loss_fn_inputs


def test_a_matrix_is_sent_without_its_zeros():
    matrix = np.array([[0, 3], [0, 0], [5, 0]], np.int64)
    sent = tensor_of(matrix)
    assert list(sent.data or []) == [3, 5]
    assert sent.to_numpy().tolist() == matrix.tolist()


@pytest.mark.parametrize("more", [{"reward_weight": 0.5}, {"kl_discount": 0.5}])
def test_what_is_for_sampled_tokens_is_refused(more: dict[str, float]):
    with pytest.raises(ValueError, match="for `loss: sampled`"):
        settings("jsd", **more)
