"""Maps AgentJet's training config to settings of `palestra train`, key by key, and lists the keys that have no effect
here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from palestra.config.load import Layers, Override
from palestra.server.agentjet.settings_file import SECTION, AgentJetError, read_keys
from palestra.util.json_types import JsonObject

DUMMY, JSONL = "random_dummy", "jsonl_dataset_file"
PLACEHOLDERS = {"", "auto", "read_yaml_name"}
"""Names that AgentJet replaces itself."""
ESTIMATORS = {"grpo": "grpo", "rloo": "leave_one_out"}
MAX_RUN_NAME = 60  # an alias has at most 64 characters, and "-12" may follow
MAX_NUMBER = 2**53  # larger whole numbers are not exact in every language
FULL_LR = 1e-5  # a smaller rate was meant for training all weights


@dataclass(slots=True)
class JobConfig:
    """The config of a training run, without what only the server knows: name, folders, tasks."""

    layers: Layers = field(default_factory=Layers)
    mapped: JsonObject = field(default_factory=dict)
    """`our.key`: value, as it was given or derived."""
    unknown: list[str] = field(default_factory=list)
    """Their keys that have no effect here."""
    notes: list[str] = field(default_factory=list)
    run: str | None = None
    """The name that the user gave it."""
    train_file: str | None = None
    """The file as the config names it. None: numbered dummy tasks, and players bring their own."""
    eval_file: str | None = None
    epochs: int | None = None
    """Used if the config does not set the number of steps."""

    def set(self, ours: str, value: object, source: str) -> None:
        self.layers.override(Override(ours, value, source))
        self.mapped[ours] = value


DIRECT = {
    "rollout.num_repeat": "rollout.group_size",
    "data.train_batch_size": "rollout.groups_per_step",
    "rollout.temperature": "rollout.temperature",
    "rollout.top_p": "rollout.top_p",
    "rollout.top_k": "rollout.top_k",
    "rollout.max_response_length_in_one_turn": "rollout.max_tokens",
    "trainer_common.total_training_steps": "steps",
    "trainer_common.mini_batch_num": "algorithm.minibatches",
    "trainer_common.optim.lr": "optimizer.lr",
    "trainer_common.optim.weight_decay": "optimizer.weight_decay",
    "trainer_common.optim.grad_clip": "optimizer.grad_clip",
}
"""Their keys, under `ajet`, and ours."""


OF_CALLS = ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_tokens")
OF_CALLS_TEXT = "temperature, top_p, top_k and max_tokens"


def map_job(text: str, find_model: Callable[[str], str]) -> JobConfig:
    """Maps a config. `find_model` returns the name under which this server serves a path or a name; it raises
    AgentJetError."""
    keys, job = _Keys(read_keys(text)), JobConfig()
    for theirs, ours in DIRECT.items():
        if (value := keys.take(theirs)) is not None:
            job.set(ours, value, keys.name(theirs))
    if any(key in job.mapped for key in OF_CALLS):
        job.notes.append(
            f"a player with an OpenAI client sets {OF_CALLS_TEXT} in its calls; palestra's players get them "
            "from the run"
        )
    _model(keys, job, find_model)
    _context(keys, job)
    _optimizer(keys, job)
    _advantage(keys, job)
    _kl(keys, job)
    _tasks(keys, job)
    _evaluation(keys, job)
    _length(keys, job)
    job.run = _run_name(keys)
    job.unknown = sorted(keys.left)
    return job


class _Keys:
    """The keys that have not been read yet."""

    def __init__(self, found: JsonObject):
        self.left = found

    def name(self, theirs: str) -> str:
        return f"{SECTION}.{theirs}"

    def take(self, theirs: str) -> Any:
        """Removes a key and returns its value, which must be a single one; None if it is missing."""
        value = self.left.pop(self.name(theirs), None)
        if value is not None and not isinstance(value, str | bool | int | float):
            raise AgentJetError(f"{self.name(theirs)}: a single value is needed, found a {type(value).__name__}")
        if isinstance(value, float | int) and not abs(value) <= MAX_NUMBER:
            raise AgentJetError(f"{self.name(theirs)}: {value!s:.80} is not a finite number")
        return value

    def take_number(self, theirs: str) -> float | None:
        value = self.take(theirs)
        if isinstance(value, str | bool):
            raise AgentJetError(f"{self.name(theirs)}: a number is needed, found {value!r:.80}")
        return value

    def take_flag(self, theirs: str) -> bool | None:
        value = self.take(theirs)
        if value is not None and not isinstance(value, bool):
            raise AgentJetError(f"{self.name(theirs)}: true or false is needed, found {value!r:.80}")
        return value

    def take_list(self, theirs: str, length: int) -> list[float] | None:
        value = self.left.pop(self.name(theirs), None)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == length and all(type(one) in (float, int) for one in value):
            return value
        raise AgentJetError(f"{self.name(theirs)}: a list of {length} numbers is needed")


def _model(keys: _Keys, job: JobConfig, find_model: Callable[[str], str]) -> None:
    path = keys.take("model.path")
    if path is None:
        raise AgentJetError(
            f"{keys.name('model.path')} is missing; give the name that this server has for the model to train"
        )
    job.set("model.name", find_model(str(path)), keys.name("model.path"))
    rank = keys.take_number("lora.lora_rank")
    if rank:
        job.set("model.rank", rank, keys.name("lora.lora_rank"))
    elif rank is not None:
        job.notes.append("this server trains LoRA adapters only: lora_rank 0 becomes the default rank")


def _context(keys: _Keys, job: JobConfig) -> None:
    if (length := keys.take("rollout.max_model_len")) is not None:
        job.set("rollout.max_context", length, keys.name("rollout.max_model_len"))
        job.set("data.max_sequence_length", length, keys.name("rollout.max_model_len"))


def _optimizer(keys: _Keys, job: JobConfig) -> None:
    optim = "trainer_common.optim"
    if (betas := keys.take_list(f"{optim}.betas", 2)) is not None:
        for ours, beta in zip(("optimizer.beta1", "optimizer.beta2"), betas, strict=True):
            job.set(ours, beta, keys.name(f"{optim}.betas"))
    if (warmup := keys.take_number(f"{optim}.lr_warmup_steps")) is not None:
        job.set("optimizer.warmup_steps", max(0, warmup), keys.name(f"{optim}.lr_warmup_steps"))  # -1 means none
    if (schedule := keys.take(f"{optim}.lr_scheduler_type")) is not None:
        job.set("optimizer.schedule", schedule, keys.name(f"{optim}.lr_scheduler_type"))
    rate = job.mapped.get("optimizer.lr")
    if isinstance(rate, float) and rate < FULL_LR:
        job.notes.append(f"lr {rate:g} is small for the LoRA adapters trained here; start with 1e-4")


def _advantage(keys: _Keys, job: JobConfig) -> None:
    key = "trainer_common.algorithm.adv_estimator"
    if (estimator := keys.take(key)) is not None:
        if estimator not in ESTIMATORS:
            raise AgentJetError(f"{keys.name(key)}: {estimator!r:.80} is not supported; use {' or '.join(ESTIMATORS)}")
        job.set("algorithm.advantage", ESTIMATORS[estimator], keys.name(key))


def _kl(keys: _Keys, job: JobConfig) -> None:
    """Maps the KL setting: theirs is a term of the loss, ours is subtracted from each token's advantage."""
    used, weight = keys.take_flag("trainer_common.use_kl_loss"), keys.take("trainer_common.kl_loss_coef")
    if used is False:
        job.set("penalty.kl", 0.0, keys.name("trainer_common.use_kl_loss"))
    elif weight is not None:
        job.set("penalty.kl", weight, keys.name("trainer_common.kl_loss_coef"))


def _tasks(keys: _Keys, job: JobConfig) -> None:
    kind = keys.take("task_reader.type") or DUMMY
    if kind == DUMMY:
        return
    if kind != JSONL:
        raise AgentJetError(
            f"{keys.name('task_reader.type')}: {kind!r:.80} is not supported; use {DUMMY} (players bring "
            f"their own tasks) or {JSONL}"
        )
    files = [keys.take(f"task_reader.{JSONL}.{part}.file_path") for part in ("training", "validation")]
    job.train_file, job.eval_file = (None if file is None else str(file) for file in files)
    if job.train_file is None:
        raise AgentJetError(f"{keys.name(f'task_reader.{JSONL}.training.file_path')} is missing")


def _evaluation(keys: _Keys, job: JobConfig) -> None:
    """Maps evaluation only if there are tasks for it: evaluations of dummy tasks are not played, so the run would wait
    for ever."""
    if job.eval_file is None:
        job.set("eval.every", 0, "no validation tasks")
        return
    for theirs, ours in (
        ("trainer_common.test_freq", "eval.every"),
        ("trainer_common.val_pass_n", "eval.samples"),
        ("rollout.val_kwargs.temperature", "eval.temperature"),
    ):
        if (value := keys.take_number(theirs)) is not None:
            job.set(ours, max(0, value), keys.name(theirs))


def _length(keys: _Keys, job: JobConfig) -> None:
    if (every := keys.take_number("trainer_common.save_freq")) is not None:
        if every > 0:
            job.set("checkpoint.every", every, keys.name("trainer_common.save_freq"))
        else:
            job.notes.append("save_freq: a run that never saves cannot be resumed after a crash; the default is used")
    epochs = keys.take_number("trainer_common.total_epochs")
    if "steps" not in job.mapped and epochs is not None:
        if epochs != int(epochs) or epochs < 1:
            raise AgentJetError(f"{keys.name('trainer_common.total_epochs')}: 1 or more is needed, found {epochs}")
        job.epochs = int(epochs)


def _run_name(keys: _Keys) -> str | None:
    """Returns the experiment's name, or else the last part of its folder. It is only a name; the config does not decide
    where runs are stored."""
    name, folder = keys.take("experiment_name"), keys.take("experiment_dir")
    for given in (name, None if folder is None else PurePath(str(folder)).name):
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", str(given or "")).strip("-._")[:MAX_RUN_NAME]
        if text and str(given) not in PLACEHOLDERS:
            return text
    return None
