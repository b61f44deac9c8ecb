"""Advantages, losses and rewards of one's own, which a config names as `package.module:function`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from palestra.config.algorithm import AdvantageKind, AlgorithmConfig
from palestra.environments.guarded_calls import error_text, place_of
from palestra.environments.named_imports import NamedImportError, import_named
from palestra.environments.step_results import shown
from palestra.types import StopReason
from palestra.types.rollouts import Rollout, RolloutStop, TrainSequence, Turn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdvantageFunction", "FunctionError", "LossFunction", "LossSequence", "Rollout"]


SHIPPED = {name: f"palestra.training.trainer_losses:{name}" for name in ("sapo", "gmpo")}
"""Losses that run in the trainer's process like those of users."""

ARGUMENTS = {
    "algorithm.advantage": ("rewards", "rollouts"),
    "algorithm.loss": ("logprobs", "sequences"),
    "reward": ("rollout",),
}
"""What functions are called with, by the setting that names them."""


class FunctionError(ValueError):
    """A function of the user's cannot be used; the message names it and says what is wrong."""


class AdvantageFunction(Protocol):
    """What `algorithm.advantage` may name."""

    def __call__(self, rewards: Sequence[float], rollouts: Sequence[Rollout], /) -> Sequence[float]:
        """Returns the advantage of each rollout of a group; `rewards` are theirs, with penalties subtracted. It is
        called several times in a step, and must return the same for the same group."""
        ...


@dataclass(frozen=True, slots=True)
class LossSequence:
    """One sequence of a minibatch; position i of each tensor is about predicting token i + 1."""

    old_logprobs: Tensor
    """The sampler's, or the trainer's own before the step; 0 where nothing was sampled."""
    advantages: Tensor
    """Already normalised, so that the loss is a sum over tokens; 0 where nothing was sampled."""
    mask: Tensor
    """True for tokens that the policy sampled."""


class LossFunction(Protocol):
    """What `algorithm.loss` may name; it gets `algorithm.loss_config` as further keyword arguments."""

    def __call__(
        self, logprobs: Sequence[Tensor], sequences: Sequence[LossSequence], /
    ) -> tuple[Tensor, Mapping[str, float]]:
        """Returns the loss of a minibatch, a scalar, and metrics. `logprobs` has the policy's logprobs of each
        sequence, by which the loss is differentiated."""
        ...


@dataclass(frozen=True, slots=True)
class LossGradient:
    loss: float
    gradients: list[list[float]]
    """For each sequence, the derivative of the loss by the logprob of each of `tokens[1:]`."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class CustomAdvantage:
    name: str
    function: AdvantageFunction

    def advantages(self, rewards: Sequence[float], rollouts: Sequence[Rollout]) -> list[float]:
        """Returns one advantage for each reward. Raises FunctionError."""
        where = f"algorithm.advantage {self.name!r}, for the rewards {shown(list(rewards))},"
        found = _call(where, self.function, rewards, rollouts)
        try:
            advantages = [float(one) for one in found]
        except (TypeError, ValueError):
            raise FunctionError(f"{where} must return a number for each reward, not {shown(found)}") from None
        if len(advantages) != len(rewards):
            raise FunctionError(
                f"{where} returned {len(advantages)} advantages for {len(rewards)} rewards; return one for each"
            )
        if not all(map(math.isfinite, advantages)):
            raise FunctionError(f"{where} returned {shown(advantages)}; every advantage must be a finite number")
        return advantages


@dataclass(frozen=True, slots=True)
class CustomLoss:
    name: str
    function: LossFunction
    settings: Mapping[str, float]

    def differentiate(self, batch: Sequence[TrainSequence], logprobs: Sequence[Sequence[float]]) -> LossGradient:
        """Returns the loss and its gradient. `logprobs` are the trainer's of `tokens[1:]`. Raises FunctionError."""
        import torch  # here, since only such a loss needs it in the trainer's process

        where = f"algorithm.loss {self.name!r}"
        leaves = [torch.tensor(one, dtype=torch.float32, requires_grad=True) for one in logprobs]
        found = _call(where, self.function, leaves, [_loss_sequence(one) for one in batch], **self.settings)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            raise FunctionError(f"{where} must return the loss and a mapping of metrics, not {shown(found)}")
        loss, metrics = found
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else shown(loss)
            raise FunctionError(f"{where} must return a scalar tensor as its loss, not {what}; .sum() makes one")
        if not loss.requires_grad:
            raise FunctionError(f"{where} returned a loss that does not depend on the logprobs it was given")
        found_B = torch.autograd.grad(loss, leaves, allow_unused=True)
        gradients = [[0.0] * len(leaf) if g is None else g.tolist() for leaf, g in zip(leaves, found_B, strict=True)]
        if not math.isfinite(loss.item()) or not all(math.isfinite(one) for row in gradients for one in row):
            raise FunctionError(f"{where} returned the loss {loss.item()}; it and its gradient must be finite")
        return LossGradient(loss.item(), gradients, _numbers(where, metrics))


def check_functions(algorithm: AlgorithmConfig) -> None:
    """Imports the functions that the config names, and calls each once on made-up data. Raises FunctionError."""
    if not isinstance(algorithm.advantage, AdvantageKind):
        advantage = custom_advantage(algorithm.advantage)
        # Equal rewards and a single one happen too: in a group that is kept, or with several agents.
        for rewards in ([0.0, 1.0, 0.5, 1.0], [1.0, 1.0], [1.0]):
            advantage.advantages(rewards, [_made_up_rollout(index, one) for index, one in enumerate(rewards)])
    if (loss := custom_loss(algorithm)) is not None:
        batch = [_made_up_sequence(5, 0.5), _made_up_sequence(3, -0.5)]
        for part in (batch, batch[:1]):
            loss.differentiate(part, [[-0.6] * (len(sequence.tokens) - 1) for sequence in part])


def custom_advantage(name: str) -> CustomAdvantage:
    """Imports `package.module:function`. Raises FunctionError."""
    return CustomAdvantage(name, _function("algorithm.advantage", name))


@dataclass(frozen=True, slots=True)
class CustomReward:
    """A function that is called with a rollout that has ended and returns its reward."""

    name: str
    function: Callable[[Rollout], float]

    @classmethod
    def load(cls, name: str) -> CustomReward:
        """Imports `package.module:function`. Raises FunctionError."""
        return cls(name, _function("reward", name))

    def of(self, rollout: Rollout) -> float:
        """Raises FunctionError unless the function returns a finite number."""
        where = f"reward {self.name!r}, for rollout {rollout.id},"
        found = _call(where, self.function, rollout)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise FunctionError(f"{where} returned {shown(found)}; a reward must be a finite number")
        return float(found)


def custom_loss(algorithm: AlgorithmConfig) -> CustomLoss | None:
    """Returns the function that the config names; None if it names a loss of the engine. Raises FunctionError."""
    name, settings = SHIPPED.get(algorithm.loss, algorithm.loss), algorithm.loss_config
    if ":" not in name:
        return None
    try:
        import torch  # noqa: F401 (asked for here, so that it is missed before the first step)
    except ModuleNotFoundError:
        raise FunctionError(f"algorithm.loss {name!r} needs torch here; to install: pip install torch") from None
    return CustomLoss(name, _function("algorithm.loss", name, tuple(sorted(settings))), settings)


@cache
def _function(setting: str, name: str, keywords: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Imports a function and checks that it can be called. `keywords`: names of the arguments besides ARGUMENTS."""
    try:
        function = import_named(name, "function")
    except NamedImportError as error:
        raise FunctionError(f"{setting} {name!r}: {error}") from error
    if inspect.iscoroutinefunction(function):
        raise FunctionError(f"{setting} {name!r} is async; write it as a plain function")
    try:
        inspect.signature(function).bind(*ARGUMENTS[setting], **dict.fromkeys(keywords))
    except TypeError as error:
        first = ", ".join(ARGUMENTS[setting])
        call = ", ".join([first, *(f"{keyword}=…" for keyword in keywords)])
        takes = f"takes {inspect.signature(function)}"
        raise FunctionError(f"{setting} {name!r} {takes}, but is called with ({call}): {error}") from None
    except ValueError:
        pass  # written in C, without a signature: the dry run shows whether it can be called
    return function


def _call(where: str, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise FunctionError(f"{where} raised {error_text(error)}{place_of(error, __file__)}") from error


def _numbers(where: str, metrics: Mapping[Any, Any]) -> dict[str, float]:
    import torch

    try:
        with torch.no_grad():  # a tensor that has a gradient is a number, too
            found = {str(name): float(torch.as_tensor(value)) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError):
        raise FunctionError(f"{where} must return numbers as metrics, not {shown(metrics)}") from None
    if not all(map(math.isfinite, found.values())):
        raise FunctionError(f"{where} returned the metrics {shown(found)}, which must be finite")
    return found


def _loss_sequence(sequence: TrainSequence) -> LossSequence:
    import torch

    return LossSequence(
        old_logprobs=torch.tensor(sequence.logprobs[1:], dtype=torch.float32),
        advantages=torch.tensor(sequence.advantages[1:], dtype=torch.float32),
        mask=torch.tensor(sequence.mask[1:]),
    )


def _made_up_rollout(index: int, reward: float) -> Rollout:
    turn = Turn(
        observation=[], tokens=[3] * (index + 1), logprobs=[-0.5] * (index + 1), stop=StopReason.STOP, version=0
    )
    return Rollout(
        id=f"made-up-{index}",
        group="made-up",
        index=index,
        task="made-up",
        environment="made-up",
        seed=0,
        stop=RolloutStop.DONE,
        prompt=[1, 2],
        turns=[turn],
        reward=reward,
    )


def _made_up_sequence(sampled: int, advantage: float) -> TrainSequence:
    mask = [False, False, *[True] * sampled]
    return TrainSequence(
        tokens=list(range(len(mask))),
        mask=mask,
        logprobs=[-0.5 if one else 0.0 for one in mask],
        advantages=[advantage / 8 if one else 0.0 for one in mask],
    )
