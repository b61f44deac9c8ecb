"""Log-probabilities of a few rows of logits: the same numbers for the trainer's targets and the sampler's draws."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from palestra.model import kernels

FEW_TARGETS = 8  # of one position; the kernel looks for each of them in every block of the vocabulary


def log_softmax(logits: Tensor) -> Tensor:
    """float32, over the last dimension of [rows, vocabulary]."""
    if not kernels.can_run_on(logits.device):
        return torch.log_softmax(logits.float(), -1)
    from palestra.model.kernels.head import log_sum_exp

    return logits.float() - log_sum_exp(logits)[:, None]


class TargetRows(Protocol):
    """The distributions of a few rows."""

    def logprobs(self, targets: Tensor) -> Tensor:
        """float32 log-probabilities of [rows, K] targets."""
        ...

    def pick(self, rows: Tensor) -> TargetRows: ...

    def entropies(self) -> Tensor:
        """float32 [rows], in nats."""
        ...

    def logits_gradient(self, targets: Tensor, grads: Tensor) -> Tensor:
        """d loss / d logits = grad * (one-hot - p), summed over a row's targets. Ends the use of the rows."""
        ...


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(x / cap) of each, in place."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def target_rows(logits: Tensor, n_targets: int, cap: float | None = None) -> TargetRows:
    """Takes the logits over: they may be overwritten. With a cap, those of the product, before it."""
    if cap is not None:
        capped = cap_logits(logits, cap)
        slopes = (capped / cap).square_().neg_().add_(1.0)
        return _CappedRows(target_rows(capped, n_targets), slopes)
    if kernels.can_run(logits.device, logits.dtype) and n_targets <= FEW_TARGETS:
        return _KernelRows(logits)
    return _PlainRows(log_softmax(logits), logits.dtype)


class _PlainRows:
    def __init__(self, logp: Tensor, dtype: torch.dtype):
        self.logp, self.dtype = logp, dtype
        self.p: Tensor | None = None
        """Kept from the entropies for the gradient."""

    def logprobs(self, targets: Tensor) -> Tensor:
        return self.logp.gather(1, targets)

    def pick(self, rows: Tensor) -> _PlainRows:
        return _PlainRows(self.logp[rows], self.dtype)

    def entropies(self) -> Tensor:
        self.p = self.logp.exp()
        return -torch.linalg.vecdot(self.p, self.logp)

    def logits_gradient(self, targets: Tensor, grads: Tensor) -> Tensor:
        p = self.logp.exp_() if self.p is None else self.p
        wide = p.mul_(-grads.sum(1, keepdim=True)).scatter_add_(1, targets, grads)
        return wide.to(self.dtype)


class _CappedRows:
    """Rows of capped logits; gradients are those of the product's."""

    def __init__(self, rows: TargetRows, slopes: Tensor):
        self.rows, self.slopes = rows, slopes

    def logprobs(self, targets: Tensor) -> Tensor:
        return self.rows.logprobs(targets)

    def pick(self, rows: Tensor) -> _CappedRows:
        return _CappedRows(self.rows.pick(rows), self.slopes[rows])

    def entropies(self) -> Tensor:
        return self.rows.entropies()

    def logits_gradient(self, targets: Tensor, grads: Tensor) -> Tensor:
        return self.rows.logits_gradient(targets, grads).mul_(self.slopes)


class _KernelRows:
    """Without a float32 copy of the logits."""

    def __init__(self, logits: Tensor, sums: Tensor | None = None):
        from palestra.model.kernels.head import log_sum_exp

        self.logits, self.sums = logits, log_sum_exp(logits) if sums is None else sums

    def logprobs(self, targets: Tensor) -> Tensor:
        return self.logits.gather(1, targets).float() - self.sums[:, None]

    def pick(self, rows: Tensor) -> _KernelRows:
        return _KernelRows(self.logits[rows], self.sums[rows])

    def entropies(self) -> Tensor:
        from palestra.model.kernels.head import entropies

        return entropies(self.logits, self.sums)

    def logits_gradient(self, targets: Tensor, grads: Tensor) -> Tensor:
        from palestra.model.kernels.head import logits_gradient_

        return logits_gradient_(self.logits, self.sums, targets, grads)
