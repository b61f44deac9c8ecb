"""Direct preference optimization: makes chosen answers more likely than rejected ones, compared with a reference model.

Owns: the loss and its gradient, the reference's logprobs. Never touches: the form of files, the engine.

For an answer, let s be the sum of its logprobs minus the same sum under the reference. The loss of a pair is -log
sigmoid(m), with m = beta * (s_chosen - s_rejected). Its derivative by each logprob of the chosen answer is -c, by each
of the rejected one +c, where c = beta * sigmoid(-m). The engine's cross entropy is the sum of -weight * logprob, with
derivatives -weight. So one forward pass, which gives c, and then cross entropy with the weights +c and -c make an exact
step of DPO, and no gradient has to leave the engine.
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
from palestra.training.batches.sft_examples import Example, encode_example
from palestra.training.loops.data_loop import (
    Metrics,
    StepOutcome,
    batch_metrics,
    optimizer_metrics,
    run_steps,
    speed_metrics,
)
from palestra.training.loops.lr_schedule import adam_at
from palestra.training.session import TrainingSession
from palestra.types.rollouts import TrainSequence


class PairExample(Struct):
    row: int
    chosen: Example
    rejected: Example

    @property
    def sequences(self) -> list[TrainSequence]:
        return [self.chosen.sequence, self.rejected.sequence]


class AnswerLogprobs(Struct, frozen=True):
    """Summed log-probabilities of the two answers of a pair, under one model."""

    chosen: float
    rejected: float


class PairPreference(Struct, frozen=True):
    """How the policy rates a pair. A reward is beta times the policy's logprob minus the reference's."""

    chosen_reward: float
    rejected_reward: float

    @classmethod
    def of(cls, policy: AnswerLogprobs, reference: AnswerLogprobs, beta: float) -> PairPreference:
        return cls(beta * (policy.chosen - reference.chosen), beta * (policy.rejected - reference.rejected))

    @property
    def margin(self) -> float:
        return self.chosen_reward - self.rejected_reward

    @property
    def loss(self) -> float:
        """-log sigmoid(margin), written so that no margin overflows."""
        return max(0.0, -self.margin) + math.log1p(math.exp(-abs(self.margin)))

    @property
    def pull(self) -> float:
        """sigmoid(-margin): how far the pair is from learned, from 0 to 1."""
        return 0.5 * (1.0 - math.tanh(self.margin / 2))


async def run_dpo(config: DpoConfig, session: TrainingSession) -> RunStatus:
    """Runs DPO. Raises DatasetError, PolicyError, SamplingError."""
    rows = PairRows(config, session.tokenizer)
    reference = ReferencePolicy(await open_reference(config, session))
    return await run_steps(config, session, DpoLearner(config, session, rows, reference))


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

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> PairExample | None:
        """Returns a pair; None if one of its answers lies wholly beyond the limit. Raises DatasetError if the chat
        template refuses it."""
        pair = self._rows[index]
        try:
            chosen = encode_example(self._tokenizer, pair.chosen, self._limit)
            rejected = encode_example(self._tokenizer, pair.rejected, self._limit)
        except ChatError as error:
            raise DatasetError(str(error), self._rows.place(index)) from error
        return PairExample(index, chosen, rejected) if chosen.trained and rejected.trained else None


class ReferencePolicy:
    """The reference model, which is asked once about each pair because it does not change."""

    def __init__(self, sampler: PolicySampler) -> None:
        self._sampler = sampler
        self._known: dict[int, AnswerLogprobs] = {}
        """Known logprobs, by row."""

    async def logprobs(self, pairs: Sequence[PairExample]) -> list[AnswerLogprobs]:
        unknown = {pair.row: pair for pair in pairs if pair.row not in self._known}
        found = await asyncio.gather(*(self._score(pair) for pair in unknown.values()))
        self._known |= dict(zip(unknown, found, strict=True))
        return [self._known[pair.row] for pair in pairs]

    async def _score(self, pair: PairExample) -> AnswerLogprobs:
        scores = await asyncio.gather(*(self._sampler.score(sequence.tokens) for sequence in pair.sequences))
        return answer_logprobs(pair, *(score[1:] for score in scores))


class DpoLearner:
    def __init__(self, config: DpoConfig, session: TrainingSession, rows: PairRows, reference: ReferencePolicy) -> None:
        self._config, self._policy, self._state = config, session.policy, session.state
        self._listener, self._rows, self._reference = session.listener, rows, reference
        self._order = DataOrder(len(rows), config.seed, rows.read)

    async def step(self, position: int) -> StepOutcome:
        clock, size = StageClock(self._listener), self._config.batch_size
        with clock.of(Stage.COLLECT, size):
            drawn = await asyncio.to_thread(self._order.draw, position, size)
        batch = [sequence for pair in drawn.items for sequence in pair.sequences]
        with clock.of(Stage.SCORE, 1):
            preferences = await self._compare(drawn.items, batch)
            weigh(drawn.items, preferences, self._config.beta)
        adam = adam_at(self._config.optimizer, self._state.step, self._config.steps)
        with clock.of(Stage.UPDATE, 1):
            update = await self._policy.update(batch, "cross_entropy", {}, adam)
        metrics = {
            **preference_metrics(preferences),
            "data/epoch": drawn.position / len(self._rows),
            **batch_metrics([one for pair in drawn.items for one in (pair.chosen, pair.rejected)], drawn.skipped),
            **optimizer_metrics(update, adam.learning_rate),
            **speed_metrics(clock, sum(len(sequence.tokens) for sequence in batch)),
        }
        return StepOutcome(metrics, drawn.position)

    async def _compare(self, pairs: Sequence[PairExample], batch: Sequence[TrainSequence]) -> list[PairPreference]:
        reference_B, forward = await asyncio.gather(self._reference.logprobs(pairs), self._policy.forward(batch))
        both = zip(forward.logprobs[::2], forward.logprobs[1::2], strict=True)
        policy_B = [answer_logprobs(pair, *logprobs) for pair, logprobs in zip(pairs, both, strict=True)]
        return [
            PairPreference.of(policy, reference, self._config.beta)
            for policy, reference in zip(policy_B, reference_B, strict=True)
        ]


def weigh(pairs: Sequence[PairExample], preferences: Sequence[PairPreference], beta: float) -> None:
    """Sets the weights with which the gradient of cross entropy is that of the mean DPO loss; see the module's
    docstring."""
    for pair, preference in zip(pairs, preferences, strict=True):
        weight = beta * preference.pull / len(pairs)
        for sequence, signed in zip(pair.sequences, (weight, -weight), strict=True):
            sequence.advantages = [signed if trained else 0.0 for trained in sequence.mask]


def answer_logprobs(pair: PairExample, chosen: Sequence[float], rejected: Sequence[float]) -> AnswerLogprobs:
    """`chosen` and `rejected` have the logprobs of each token but the first."""

    def total(sequence: TrainSequence, logprobs: Sequence[float]) -> float:
        return math.fsum(one for one, trained in zip(logprobs, sequence.mask[1:], strict=True) if trained)

    return AnswerLogprobs(total(pair.chosen.sequence, chosen), total(pair.rejected.sequence, rejected))


def preference_metrics(preferences: Sequence[PairPreference]) -> Metrics:
    return {
        "loss/mean": average([one.loss for one in preferences]),
        "dpo/accuracy": average([float(one.margin > 0) for one in preferences]),
        "dpo/margin": average([one.margin for one in preferences]),
        "dpo/chosen_reward": average([one.chosen_reward for one in preferences]),
        "dpo/rejected_reward": average([one.rejected_reward for one in preferences]),
    }
