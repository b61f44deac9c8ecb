"""KTO: answers that are labelled desirable or not, without pairs.

An answer counts as far as its reward differs from the KL between policy and reference. The KL is estimated as in the
paper: by the answers of a batch that are put after the prompt of the one before, on which neither was trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from palestra.chat import ChatError, ChatTokenizer
from palestra.config.train import DpoConfig
from palestra.data.conversations import CHECKED_ROWS, Conversation, ConversationFile, labelled_of
from palestra.data.errors import DatasetError
from palestra.rollouts.group_metrics import average
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.runs.listener import Stage, StageClock
from palestra.runs.reader import RunStatus
from palestra.training.batches.data_order import DataOrder
from palestra.training.batches.preference_losses import AnswerScore, LabelledLoss, estimate_kl, judge
from palestra.training.batches.sft_examples import Example, check_pictures, encode_example
from palestra.training.loops.data_loop import (
    Metrics,
    StepOutcome,
    batch_metrics,
    finish_step,
    run_steps,
)
from palestra.training.loops.dpo import answer_logprob, open_reference, set_weight, sum_answer
from palestra.training.session import TrainingSession
from palestra.types.pictures import whole_pictures
from palestra.types.rollouts import TrainSequence


class LabelledExample(Struct):
    example: Example
    is_desirable: bool


async def run_kto(config: DpoConfig, session: TrainingSession) -> RunStatus:
    """Raises DatasetError, PolicyError, SamplingError."""
    rows = LabelledRows(config, session.tokenizer)
    return await run_steps(config, session, KtoLearner(config, session, rows, await open_reference(config, session)))


def check_kto(config: DpoConfig, tokenizer: ChatTokenizer) -> None:
    """Checks all lines of the file, and encodes the first of them. Raises DatasetError."""
    rows = LabelledRows(config, tokenizer)
    for index in range(min(CHECKED_ROWS, len(rows))):
        rows.read(index)


class LabelledRows:
    def __init__(self, config: DpoConfig, tokenizer: ChatTokenizer) -> None:
        """Raises DatasetError."""
        self._limit, self._tokenizer = config.max_sequence_length, tokenizer
        self._rows = ConversationFile(config.data, labelled_of)
        check_pictures(self._rows, tokenizer)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> list[LabelledExample] | None:
        """Returns the answers of a row; None if all of them lie wholly beyond the limit. Raises DatasetError if the
        chat template refuses one."""
        place = self._rows.place(index)

        def encoded(conversation: Conversation) -> Example:
            return encode_example(self._tokenizer, conversation, self._limit, source=str(place))

        try:
            found = [LabelledExample(encoded(one.conversation), one.is_desirable) for one in self._rows[index]]
        except ChatError as error:
            raise DatasetError(str(error), place) from error
        return [one for one in found if one.example.trained] or None


class KtoLearner:
    def __init__(
        self, config: DpoConfig, session: TrainingSession, rows: LabelledRows, reference: PolicySampler
    ) -> None:
        self._config, self._session, self._policy = config, session, session.policy
        self._listener, self._rows, self._reference = session.listener, rows, reference
        self._order = DataOrder(len(rows), config.seed, rows.read)

    async def step(self, position: int) -> StepOutcome:
        clock, size = StageClock(self._listener), self._config.batch_size
        with clock.of(Stage.COLLECT, size):
            drawn = await asyncio.to_thread(self._order.draw, position, size)
        answers = [answer for row in drawn.items for answer in row]
        batch = [one.example.sequence for one in answers]
        with clock.of(Stage.SCORE, 1):
            scores = await self._score([*batch, *mismatched(batch, self._config.max_sequence_length)])
            kl = estimate_kl(scores[len(batch) :])
            losses = [
                judge(self._config, score, is_desirable=one.is_desirable, kl=kl)
                for one, score in zip(answers, scores, strict=False)
            ]
            for sequence, loss in zip(batch, losses, strict=True):
                set_weight(sequence, -loss.by_answer / len(batch))
        metrics = {
            **label_metrics(answers, losses, kl),
            "data/epoch": drawn.position / len(self._rows),
            **batch_metrics([one.example for one in answers], drawn.skipped),
        }
        return StepOutcome(await finish_step(self._config, self._session, batch, clock, metrics), drawn.position)

    async def _score(self, batch: Sequence[TrainSequence]) -> list[AnswerScore]:
        reference_B, forward = await asyncio.gather(
            asyncio.gather(*(answer_logprob(self._reference, one) for one in batch)), self._policy.forward(batch)
        )
        policy_B = map(sum_answer, batch, forward.logprobs)
        return [
            AnswerScore(own, sum(sequence.mask), other)
            for sequence, own, other in zip(batch, policy_B, reference_B, strict=True)
        ]


def mismatched(batch: Sequence[TrainSequence], limit: int) -> list[TrainSequence]:
    """Each answer after the prompt of the one before it in the batch; none if the batch has one answer, or where
    nothing of it is within the limit."""
    made = []
    for before, own in zip(batch, [*batch[1:], *batch[:1]] if len(batch) > 1 else [], strict=False):
        prompt, start = before.tokens[: before.mask.index(True)], own.mask.index(True)
        tokens, mask = prompt + own.tokens[start:], [False] * len(prompt) + own.mask[start:]
        cut, pictures = whole_pictures([one for one in before.pictures if one.end <= len(prompt)], limit)
        size = len(tokens[:cut])
        made.append(
            TrainSequence(
                tokens=tokens[:cut],
                mask=mask[:cut],
                logprobs=[0.0] * size,
                advantages=[0.0] * size,
                pictures=pictures,
            )
        )
    return [one for one in made if any(one.mask)]


def label_metrics(answers: Sequence[LabelledExample], losses: Sequence[LabelledLoss], kl: float) -> Metrics:
    found = {"loss/mean": average([one.value for one in losses]), "kto/kl": kl}
    for name, is_desirable in (("desirable", True), ("undesirable", False)):
        rewards = [loss.reward for one, loss in zip(answers, losses, strict=True) if one.is_desirable == is_desirable]
        if rewards:
            found[f"kto/{name}_reward"] = average(rewards)
    return found
