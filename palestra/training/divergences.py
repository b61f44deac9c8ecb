"""Divergences between a teacher's distribution and the student's, at each sampled token.

Of a position, let p be the teacher's probabilities of its k likeliest tokens and q the student's of the same tokens;
all other tokens together are one more outcome, 1 - sum p and 1 - sum q. With k the whole vocabulary nothing is left
over, and these are the exact divergences; with a smaller k they are lower bounds, as those of any coarser view.

forward_kl   sum p (log p - log q)
reverse_kl   sum q (log q - log p)
jsd          b sum p (log p - log m) + (1 - b) sum q (log q - log m), m = b p + (1 - b) q

The student's logprobs of these tokens come from a forward pass over targets in rows, [positions, k]; a step by cross
entropy on the same targets, with minus the derivatives as weights, has the gradient of the divergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palestra.config.distillation import DistillationConfig
from palestra.types.rollouts import TrainSequence

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 1e-6  # of the probability that is left over: below it are rounding errors of float32


@dataclass(frozen=True, slots=True)
class DivergenceGradient:
    loss: float
    gradients: list[list[list[float]]]
    """For each sequence and sampled token, the derivatives by the student's logprobs of the teacher's tokens."""
    mean: float
    """Mean divergence of a sampled token, before weights."""


@dataclass(frozen=True, slots=True)
class DivergenceLoss:
    """The loss of a distillation by whole distributions; a token's advantage is its weight in the sum."""

    settings: DistillationConfig

    def differentiate(
        self, batch: Sequence[TrainSequence], student_logprobs: Sequence[Sequence[Sequence[float]]]
    ) -> DivergenceGradient:
        """`student_logprobs`: for each sequence and sampled token, those of the teacher's likeliest tokens."""
        import torch  # here, since only such a loss needs it in the trainer's process

        total, means, gradients, count = 0.0, 0.0, [], 0
        for sequence, rows in zip(batch, student_logprobs, strict=True):
            if not rows:
                gradients.append([])
                continue
            student = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
            teacher = torch.tensor([top.logprobs for top in sequence.teacher_top], dtype=torch.float64)
            values = self._values(teacher, student)
            pairs = zip(sequence.advantages, sequence.mask, strict=True)
            weights = torch.tensor([weight for weight, sampled in pairs if sampled], dtype=torch.float64)
            loss = (weights * values).sum()
            (gradient,) = torch.autograd.grad(loss, student)
            total, means, count = total + loss.item(), means + values.sum().item(), count + len(rows)
            gradients.append(gradient.tolist())
        return DivergenceGradient(total, gradients, means / max(1, count))

    def _values(self, teacher: Tensor, student: Tensor) -> Tensor:
        import torch

        has_rest = self.settings.top_k != "all"
        p, q = (with_rest(teacher), with_rest(student)) if has_rest else (teacher, student)
        match self.settings.loss:
            case "forward_kl":
                return (p.exp() * (p - q)).sum(-1)
            case "reverse_kl":
                return (q.exp() * (q - p)).sum(-1)
            case "jsd":
                share = self.settings.jsd_weight
                m = (share * p.exp() + (1 - share) * q.exp()).log()
                from_teacher, from_student = (p.exp() * (p - m)).sum(-1), (q.exp() * (q - m)).sum(-1)
                return share * from_teacher + (1 - share) * from_student
            case "sampled":
                return torch.zeros(())


def with_rest(logprobs: Tensor) -> Tensor:
    """Adds the logprob of all tokens that are not listed, as one outcome."""
    import torch

    rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(LEAST)
    return torch.cat([logprobs, rest.log()], -1)
