"""Preference optimisation on pairs: makes chosen answers more likely than rejected ones, by DPO and its relatives.

A forward pass gives the sums of logprobs, these the derivatives of the loss by them, and cross entropy with minus the
derivatives as weights makes an exact step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from msgspec import Struct

from palestra.chat import ChatError, ChatTokenizer
from palestra.config.train import DpoConfig
from palestra.data.conversations import CHECKED_ROWS, ConversationFile, pair_of
from palestra.data.errors import DatasetError
from palestra.rollouts.group_metrics import average
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.runs.listener import Stage, StageClock
from palestra.runs.reader import RunStatus
from palestra.training.batches.data_order import DataOrder
from palestra.training.batches.preference_losses import AnswerScore, PairLoss, compare, uses_reference
from palestra.training.batches.sft_examples import Example, check_pictures, encode_example
from palestra.training.loops.data_loop import (
    Metrics,
    StepOutcome,
    batch_metrics,
    finish_step,
    run_steps,
)
from palestra.training.session import TrainingSession
from palestra.types.rollouts import TrainSequence


class PairExample(Struct):
    row: int
    chosen: Example
    rejected: Example

    @property
    def sequences(self) -> list[TrainSequence]:
        return [self.chosen.sequence, self.rejected.sequence]


async def run_dpo(config: DpoConfig, session: TrainingSession) -> RunStatus:
    """Raises DatasetError, PolicyError, SamplingError."""
    rows = PairRows(config, session.tokenizer)
    sampler = await open_reference(config, session) if uses_reference(config.loss) else None
    return await run_steps(config, session, DpoLearner(config, session, rows, ReferencePolicy(sampler)))


def check_dpo(config: DpoConfig, tokenizer: ChatTokenizer) -> None:
    """Checks all lines of the file, and encodes the first of them. Raises DatasetError."""
    rows = PairRows(config, tokenizer)
    for index in range(min(CHECKED_ROWS, len(rows))):
        rows.read(index)


async def open_reference(config: DpoConfig, session: TrainingSession) -> PolicySampler:
    """Returns the weights that the run began with, also after a resume: the base model, or the weights of
    `model.start_from`."""
    start = config.model.start_from
    return await session.policy.base() if start is None else await session.policy.sampler_of(start)


class PairRows:
    """The pairs of the file, ready to be trained on."""

    def __init__(self, config: DpoConfig, tokenizer: ChatTokenizer) -> None:
        """Raises DatasetError."""
        self._limit, self._tokenizer = config.max_sequence_length, tokenizer
        self._rows = ConversationFile(config.data, pair_of)
        check_pictures(self._rows, tokenizer)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> PairExample | None:
        """Returns a pair; None if one of its answers lies wholly beyond the limit. Raises DatasetError if the chat
        template refuses it."""
        pair, place = self._rows[index], self._rows.place(index)
        try:
            chosen = encode_example(self._tokenizer, pair.chosen, self._limit, source=str(place))
            rejected = encode_example(self._tokenizer, pair.rejected, self._limit, source=str(place))
        except ChatError as error:
            raise DatasetError(str(error), place) from error
        return PairExample(index, chosen, rejected) if chosen.trained and rejected.trained else None


class ReferencePolicy:
    """The reference model, which is asked once about each pair because it does not change."""

    def __init__(self, sampler: PolicySampler | None) -> None:
        """`sampler` None: the loss has no reference."""
        self._sampler = sampler
        self._known: dict[int, tuple[float, float]] = {}
        """Sums of the logprobs of both answers, by row."""

    async def logprobs(self, pairs: Sequence[PairExample]) -> list[tuple[float, float]]:
        if self._sampler is None:
            return [(0.0, 0.0)] * len(pairs)
        unknown = {pair.row: pair for pair in pairs if pair.row not in self._known}
        found = await asyncio.gather(*(self._score(self._sampler, pair) for pair in unknown.values()))
        self._known |= dict(zip(unknown, found, strict=True))
        return [self._known[pair.row] for pair in pairs]

    async def _score(self, sampler: PolicySampler, pair: PairExample) -> tuple[float, float]:
        chosen, rejected = await asyncio.gather(*(answer_logprob(sampler, one) for one in pair.sequences))
        return chosen, rejected


class DpoLearner:
    def __init__(self, config: DpoConfig, session: TrainingSession, rows: PairRows, reference: ReferencePolicy) -> None:
        self._config, self._session, self._policy = config, session, session.policy
        self._listener, self._rows, self._reference = session.listener, rows, reference
        self._order = DataOrder(len(rows), config.seed, rows.read)

    async def step(self, position: int) -> StepOutcome:
        clock, size = StageClock(self._listener), self._config.batch_size
        with clock.of(Stage.COLLECT, size):
            drawn = await asyncio.to_thread(self._order.draw, position, size)
        batch = [sequence for pair in drawn.items for sequence in pair.sequences]
        with clock.of(Stage.SCORE, 1):
            losses = await self._compare(drawn.items, batch)
            weigh(drawn.items, losses)
        metrics = {
            **preference_metrics(losses),
            "data/epoch": drawn.position / len(self._rows),
            **batch_metrics([one for pair in drawn.items for one in (pair.chosen, pair.rejected)], drawn.skipped),
        }
        return StepOutcome(await finish_step(self._config, self._session, batch, clock, metrics), drawn.position)

    async def _compare(self, pairs: Sequence[PairExample], batch: Sequence[TrainSequence]) -> list[PairLoss]:
        reference_B, forward = await asyncio.gather(self._reference.logprobs(pairs), self._policy.forward(batch))
        policy = iter(map(sum_answer, batch, forward.logprobs))
        return [
            compare(
                self._config,
                AnswerScore(next(policy), pair.chosen.trained, chosen),
                AnswerScore(next(policy), pair.rejected.trained, rejected),
            )
            for pair, (chosen, rejected) in zip(pairs, reference_B, strict=True)
        ]


def weigh(pairs: Sequence[PairExample], losses: Sequence[PairLoss]) -> None:
    """Sets the weights with which the gradient of cross entropy is that of the mean loss."""
    for pair, loss in zip(pairs, losses, strict=True):
        for sequence, slope in zip(pair.sequences, (loss.by_chosen, loss.by_rejected), strict=True):
            set_weight(sequence, -slope / len(pairs))


def set_weight(sequence: TrainSequence, weight: float) -> None:
    sequence.advantages = [weight if trained else 0.0 for trained in sequence.mask]


async def answer_logprob(sampler: PolicySampler, sequence: TrainSequence) -> float:
    return sum_answer(sequence, (await sampler.score(sequence.tokens, pictures=sequence.pictures))[1:])


def sum_answer(sequence: TrainSequence, logprobs: Sequence[float]) -> float:
    """Sums what belongs to the answer; `logprobs` has those of each token but the first."""
    return math.fsum(one for one, trained in zip(logprobs, sequence.mask[1:], strict=True) if trained)


def preference_metrics(losses: Sequence[PairLoss]) -> Metrics:
    return {
        "loss/mean": average([one.value for one in losses]),
        "dpo/accuracy": average([float(one.margin > 0) for one in losses]),
        "dpo/margin": average([one.margin for one in losses]),
        "dpo/chosen_reward": average([one.chosen_reward for one in losses]),
        "dpo/rejected_reward": average([one.rejected_reward for one in losses]),
    }
