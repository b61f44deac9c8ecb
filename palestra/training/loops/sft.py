"""Supervised fine-tuning on the assistant's turns in a file of conversations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

from palestra.chat import ChatError, ChatTokenizer
from palestra.config.train import SftConfig
from palestra.data.conversations import CHECKED_ROWS, ConversationFile, conversation_of
from palestra.data.errors import DatasetError
from palestra.runs.listener import RunListener, Stage, StageClock
from palestra.runs.reader import RunStatus
from palestra.training.batches.data_order import DataOrder
from palestra.training.batches.sft_examples import Example, check_pictures, encode_example
from palestra.training.loops.data_loop import (
    Metrics,
    StepOutcome,
    batch_metrics,
    optimizer_metrics,
    run_steps,
    speed_metrics,
)
from palestra.training.loops.lr_schedule import adam_at
from palestra.training.policy import Policy
from palestra.training.session import TrainingSession
from palestra.types.rollouts import TrainSequence


async def run_sft(config: SftConfig, session: TrainingSession) -> RunStatus:
    """Runs SFT. Raises DatasetError, PolicyError."""
    rows = ConversationRows(config.data, config, session.tokenizer)
    learner = SftLearner(config, session, rows)
    if config.eval_data is None:
        return await run_steps(config, session, learner)
    held_out = ConversationRows(config.eval_data, config, session.tokenizer)
    evaluation = LossEvaluation(await asyncio.to_thread(held_out.read_all), config.batch_size, session)
    return await run_steps(config, session, learner, evaluate=evaluation.run, eval_every=config.eval_every)


def check_sft(config: SftConfig, tokenizer: ChatTokenizer) -> None:
    """Checks all lines of the files, and encodes the first of them. Raises DatasetError."""
    for file in filter(None, (config.data, config.eval_data)):
        rows = ConversationRows(file, config, tokenizer)
        for index in range(min(CHECKED_ROWS, len(rows))):
            rows.read(index)


class ConversationRows:
    """The rows of a file, ready to be trained on."""

    def __init__(self, file: Path, config: SftConfig, tokenizer: ChatTokenizer) -> None:
        """Raises DatasetError."""
        self._file, self._config, self._tokenizer = file, config, tokenizer
        self._rows = ConversationFile(file, conversation_of)
        check_pictures(self._rows, tokenizer)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Example | None:
        """Returns a row; None if there is nothing to learn in it. Raises DatasetError if the chat template refuses
        it."""
        place = self._rows.place(index)
        try:
            example = encode_example(
                self._tokenizer,
                self._rows[index],
                self._config.max_sequence_length,
                last_only=self._config.train_on == "last_assistant",
                source=str(place),
            )
        except ChatError as error:
            raise DatasetError(str(error), place) from error
        return example if example.trained else None

    def read_all(self) -> list[TrainSequence]:
        """Returns the rows with something to learn; there must be at least one."""
        found = [example.sequence for index in range(len(self)) if (example := self.read(index)) is not None]
        if not found:
            raise DatasetError(f"{self._file} has no text of the assistant within max_sequence_length")
        return found


class SftLearner:
    def __init__(self, config: SftConfig, session: TrainingSession, rows: ConversationRows) -> None:
        self._config, self._policy, self._state = config, session.policy, session.state
        self._listener, self._rows = session.listener, rows
        self._order = DataOrder(len(rows), config.seed, rows.read)

    async def step(self, position: int) -> StepOutcome:
        clock, size = StageClock(self._listener), self._config.batch_size
        with clock.of(Stage.COLLECT, size):
            drawn = await asyncio.to_thread(self._order.draw, position, size)
            batch = [example.sequence for example in drawn.items]
            weigh(batch)
        adam = adam_at(self._config.optimizer, self._state.step, self._config.steps)
        with clock.of(Stage.UPDATE, 1):
            update = await self._policy.update(batch, "cross_entropy", {}, adam)
        metrics = {
            "loss/mean": loss_per_token(batch, update.logprobs),
            "data/epoch": drawn.position / len(self._rows),
            **batch_metrics(drawn.items, drawn.skipped),
            **optimizer_metrics(update, adam.learning_rate),
            **speed_metrics(clock, sum(len(sequence.tokens) for sequence in batch)),
        }
        return StepOutcome(metrics, drawn.position)


class LossEvaluation:
    """Evaluates the loss on held-out conversations, always the same ones."""

    def __init__(self, sequences: Sequence[TrainSequence], batch_size: int, session: TrainingSession) -> None:
        self._sequences, self._size = sequences, batch_size
        self._policy: Policy = session.policy
        self._listener: RunListener = session.listener

    async def run(self) -> Metrics:
        logprobs: list[list[float]] = []
        clock, total = StageClock(self._listener), len(self._sequences)
        with clock.of(Stage.EVAL, total):
            while (done := len(logprobs)) < total:
                logprobs += (await self._policy.forward(self._sequences[done : done + self._size])).logprobs
                self._listener.stage(Stage.EVAL, len(logprobs), total)
        return {
            "eval/loss": loss_per_token(self._sequences, logprobs),
            "eval/rows": float(total),
            "eval/trained_tokens": float(sum(sum(sequence.mask) for sequence in self._sequences)),
            "time/eval_s": clock.seconds[Stage.EVAL],
        }


def weigh(batch: Sequence[TrainSequence]) -> None:
    """Sets the weights: the engine sums the loss over tokens, and with these weights the sum is the mean over the
    tokens learned from."""
    weight = 1.0 / sum(sum(sequence.mask) for sequence in batch)
    for sequence in batch:
        sequence.advantages = [weight if trained else 0.0 for trained in sequence.mask]


def loss_per_token(batch: Sequence[TrainSequence], logprobs: Sequence[Sequence[float]]) -> float:
    """Returns the mean loss. `logprobs` has, for each sequence, those of `tokens[1:]`."""
    found = [
        one
        for sequence, own in zip(batch, logprobs, strict=True)
        for one, trained in zip(own, sequence.mask[1:], strict=True)
        if trained
    ]
    return -math.fsum(found) / len(found)
