"""A loss of one's own. In this folder: palestra train stockroom algorithm.loss=my_loss:proximal"""

from collections.abc import Sequence

import torch

from palestra.training.custom_functions import LossSequence


def proximal(
    logprobs: Sequence[torch.Tensor], sequences: Sequence[LossSequence], beta: float = 0.1
) -> tuple[torch.Tensor, dict[str, float]]:
    """Importance sampling, with a price for moving logprobs away from where they were (algorithm.loss_config.beta)."""
    pairs = list(zip(logprobs, sequences, strict=True))
    moves = [torch.where(one.mask, own - one.old_logprobs, 0.0) for own, one in pairs]
    gain = sum((move.exp() * one.advantages).sum() for move, one in zip(moves, sequences, strict=True))
    price = torch.cat(moves).square().sum() / sum(one.mask.sum() for one in sequences)
    return beta * price - gain, {"moved": price.detach().sqrt().item()}
