"""Log-probabilities, entropies and the gradient of logits by kernels agree with torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from palestra.model.training.log_softmax import log_softmax, target_rows

Close = Callable[[Tensor, Tensor], None]
ROWS, VOCAB = 3, 5000  # more than a block of the vocabulary


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("n_targets", [1, 3])
def test_target_logprobs_and_their_gradient(
    n_targets: int, device: str, dtype: torch.dtype, assert_close: Close
) -> None:
    logits = (torch.randn(ROWS, VOCAB, device=device) * 3).to(dtype)
    targets = torch.randint(0, VOCAB, (ROWS, n_targets), device=device)
    grads = torch.randn(ROWS, n_targets, device=device)
    wide = logits.float().requires_grad_()
    expected = torch.log_softmax(wide, -1).gather(1, targets)
    rows = target_rows(logits.clone(), n_targets)
    assert torch.allclose(rows.logprobs(targets), expected, atol=1e-4)
    assert torch.equal(rows.logprobs(targets), log_softmax(logits).gather(1, targets)), "as the sampler has them"
    picked = torch.tensor([2, 0], device=device)
    assert torch.equal(rows.pick(picked).logprobs(targets[picked]), rows.logprobs(targets)[picked])
    everywhere = torch.log_softmax(wide.detach(), -1)
    assert torch.allclose(rows.entropies(), -(everywhere.exp() * everywhere).sum(-1), atol=1e-3)
    assert torch.equal(rows.pick(picked).entropies(), rows.entropies()[picked])
    (d_expected,) = torch.autograd.grad(expected, wide, grads)
    assert_close(rows.logits_gradient(targets, grads), d_expected)
