"""Imitation before the first step of a GRPO run: SFT on solutions, for a model that solves none of its tasks."""

from __future__ import annotations

from pathlib import Path

from palestra.chat import ChatTokenizer
from palestra.config.train import PLATFORM, GrpoConfig, ImitationConfig, SftCheckpointConfig, SftConfig
from palestra.data.conversations import ConversationFile, conversation_of
from palestra.data.errors import DatasetError
from palestra.environments.fleet.gold import gold_lines
from palestra.environments.fleet.platform_tasks import PlatformTasks
from palestra.environments.fleet.prompts import PromptStyle
from palestra.environments.fleet.settings import FleetSettings
from palestra.runs.listener import RunListener, Silence, Stage
from palestra.runs.reader import IMITATION
from palestra.training.loops.sft import check_sft
from palestra.util.atomic_files import replacing

ENVIRONMENTS = ("fleet_task", "fleet")


def sft_config(config: GrpoConfig, imitation: ImitationConfig, data: Path, server: str | None = None) -> SftConfig:
    """Returns the config of the SFT run: the same model, without an alias, which is only for the GRPO run."""
    return SftConfig(
        kind="sft",
        name=IMITATION,
        data=data,
        batch_size=imitation.batch_size,
        steps=imitation.steps,
        optimizer=imitation.optimizer,
        max_sequence_length=config.data.max_sequence_length,
        checkpoint=SftCheckpointConfig(every=config.checkpoint.every, keep=1),
        model=config.model,
        seed=config.seed,
        alias=None,
        server=server,
        server_patience_s=config.server_patience_s,
    )


def check_imitation(config: GrpoConfig, imitation: ImitationConfig, tokenizer: ChatTokenizer) -> None:
    """Raises ValueError."""
    for source in imitation.data:
        if source.startswith(PLATFORM):
            PlatformTasks.parse(source)
            _prompt_style(config, source)
        else:
            check_sft(sft_config(config, imitation, Path(source)), tokenizer)


def write_conversations(config: GrpoConfig, imitation: ImitationConfig, file: Path) -> None:
    """Writes all conversations to imitate, in the order of the config; the result is always the same."""
    with replacing(file) as stream:
        for source in imitation.data:
            if source.startswith(PLATFORM):
                lines = [line.encode() for line in gold_lines(source, _prompt_style(config, source))]
            else:
                lines = ConversationFile(Path(source), conversation_of).lines
            stream.writelines(line + b"\n" for line in lines)


def _prompt_style(config: GrpoConfig, source: str) -> PromptStyle:
    """Returns the prompt style of the run's own tasks, so that solutions are written in the same style."""
    for entry in config.environments:
        if entry.name in ENVIRONMENTS:
            return FleetSettings.of(entry.config).prompt_style
    raise DatasetError(
        f"imitation.data: {source} needs the environment {ENVIRONMENTS[0]}, which is not one of the run's "
        "environments; name a JSONL file of conversations"
    )


class ImitationNotes(Silence):
    """Reports the progress of the imitation as notes to the run's own listener, which counts the steps of GRPO."""

    def __init__(self, listener: RunListener, steps: int) -> None:
        self._listener, self._steps = listener, steps

    def stage(self, stage: Stage, done: int, total: int) -> None:
        self._listener.stage(stage, done, total)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._listener.note(f"imitation step {step}/{self._steps}  loss {metrics['loss/mean']:.3f}")

    def note(self, text: str) -> None:
        self._listener.note(f"imitation: {text}")
