"""What `palestra train` can be told.

Owns: keys, defaults, bounds of a training run's config. Never touches: environments, models, the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from palestra.config.base import Config, File, Folder
from palestra.config.bundled import EPHEBE
from palestra.config.environment_entries import EnvironmentEntry, check_gyms
from palestra.config.errors import ConfigError
from palestra.config.load import Layers, merge_layers, validate
from palestra.types import MAX_TEMPERATURE
from palestra.util.json_types import JsonObject
from palestra.util.suggest import did_you_mean

TokenLimit = PositiveInt
PLATFORM = "platform:"


def _conversations(source: str) -> str:
    return source if source.startswith(PLATFORM) else str(Path(source).expanduser().absolute())


class AdvantageKind(StrEnum):
    GRPO = "grpo"
    """(reward - mean) / std of the group."""
    MEAN_BASELINE = "mean_baseline"
    """reward - mean of the group (GRPO without std)."""
    LEAVE_ONE_OUT = "leave_one_out"
    """reward - mean of the others."""
    DR_GRPO = "dr_grpo"
    """As mean_baseline, and the loss divided by a constant length instead of the batch's tokens."""


class TrainModel(Config):
    """The model to train, and the LoRA adapter on it."""

    name: str = EPHEBE
    """What the server calls it. Without `server`: a model folder, a Hugging Face id in the local cache, or the bundled
    `ephebe`."""
    tokenizer: Folder | None = None
    """A folder with tokenizer.json and a chat template. Default: the model's own; a server elsewhere needs it."""
    rank: PositiveInt = 16
    """Rank of the LoRA adapter."""
    train_unembed: bool = True
    """Whether the adapter changes the unembedding, too. A server that samples with vLLM refuses it."""
    start_from: str | None = None
    """A `tinker://…/weights/…` address to begin with."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """For a server this run starts itself."""


class RolloutConfig(Config):
    """How rollouts are played and sampled."""

    style: Literal["async", "batched"] = "async"
    """async: each rollout goes at its own speed. batched: all rollouts take their turns together."""
    group_size: PositiveInt = 8
    """Rollouts of each task, which are compared with each other."""
    groups_per_step: PositiveInt = 16
    """Tasks of a training step."""
    max_tokens: TokenLimit = 256
    """Tokens that one turn may have."""
    max_context: TokenLimit = 4096
    """Tokens of prompt and turns together; a rollout without room for another turn ends."""
    temperature: float = Field(default=1.0, gt=0, le=MAX_TEMPERATURE)
    """Sampling temperature of rollouts."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest tokens that together have this probability are drawn; 1 is off."""
    top_k: int = Field(default=-1, ge=-1)
    """Only this many of the likeliest tokens are drawn; -1 is off."""
    timeout_s: PositiveFloat = 600.0
    """Time limit of a whole rollout."""
    env_timeout_s: PositiveFloat = 60.0
    """Time limit of one call into an environment."""
    concurrency: PositiveInt = 512
    """Rollouts at once."""
    env_threads: PositiveInt = 16
    """For environments without async methods."""


class DataConfig(Config):
    """How groups of rollouts become the rows of a batch."""

    max_sequence_length: TokenLimit = 4096
    """Tokens of a row; what is longer loses its end."""
    overlong: Literal["mask", "keep"] = "mask"
    """mask: a rollout whose last turn was cut teaches nothing (DAPO's filter). keep: it counts as it was graded."""
    zero_variance: Literal["refill", "drop", "keep"] = "refill"
    """Groups whose rewards are all equal teach nothing: play others instead, drop them, or keep them."""
    max_refills: NonNegativeInt = 2
    """Rounds of playing others, each for the groups that are missing."""


class PenaltyConfig(Config):
    """What is taken off rewards before advantages are computed. Recorded rewards stay as they were."""

    length: NonNegativeFloat = 0.0
    """Taken off the reward, rising linearly over the last `length_window` tokens before `max_context` (DAPO's soft
    punishment)."""
    length_window: PositiveInt = 256
    """Tokens over which the length penalty rises."""
    format: NonNegativeFloat = 0.0
    """Taken off where the environment reports `parse_error` in its metrics."""
    cut: NonNegativeFloat = 0.0
    """Taken off where the last turn was cut."""
    kl: NonNegativeFloat = 0.0
    """Times the logprob ratio to the base model, taken off each token's advantage."""


class AlgorithmConfig(Config):
    """How rewards become a gradient: advantages, loss, normalisation."""

    advantage: AdvantageKind = AdvantageKind.GRPO
    """How a rollout is compared with its group: grpo divides by the group's standard deviation, mean_baseline does
    not, leave_one_out compares with the others' mean, dr_grpo also divides the loss by a constant length."""
    loss: Literal["importance_sampling", "ppo", "cispo", "dro", "gspo"] = "importance_sampling"
    """The policy-gradient loss, as Tinker names them."""
    loss_config: dict[str, float] = Field(default={})
    """For the loss, as clip_low_threshold and clip_high_threshold of ppo."""
    normalize: Literal["tokens", "sequences", "none"] = "tokens"
    """Losses are sums: divide the advantages by the batch's tokens, by each sequence's and then their number, or not at
    all."""
    minibatches: PositiveInt = 1
    """Optimizer steps in one training step."""
    shuffle_rewards: bool = False
    """For the control experiment: rewards are dealt out at random within a batch, and nothing may be learned."""


class OptimizerConfig(Config):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1e-4
    """Learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the root of that mean, so that nothing is divided by 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, times the learning rate."""
    grad_clip: NonNegativeFloat = 1.0
    """Limit on the global norm of the gradient; 0 is off."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls, to zero at the last step; `constant`: it does not."""


class EvalConfig(Config):
    """Evaluation on held-out tasks."""

    every: NonNegativeInt = 10
    """Steps; 0: never. A run is also looked at before its first and after its last step."""
    tasks: PositiveInt = 100
    """At most so many of each environment."""
    samples: PositiveInt = 1
    """For each task; pass@k is reported up to it."""
    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    """Sampling temperature of evaluations; 0 is greedy."""
    success: float = 1.0
    """A rollout with at least this reward counts as a success."""


class EarlyStop(Config):
    """When a run ends before its last step."""

    metric: str = "eval/success"
    """The metric of evaluations that decides."""
    at_least: float | None = None
    """Stop when it gets there."""
    patience: PositiveInt | None = None
    """Stop when it has not risen for so many evaluations."""


class CheckpointConfig(Config):
    """When weights and optimizer are saved, and how many of them are kept."""

    every: PositiveInt = 5
    """Steps. The last step is kept in any case."""
    keep: PositiveInt = 3
    """The newest so many; older ones are deleted from the server."""


class AsyncConfig(Config):
    """Playing the next rollouts while the update runs."""

    enabled: bool = False
    """Play while training, on weights that may be older by `max_staleness` versions."""
    max_staleness: NonNegativeInt = 1
    """In weight versions, between the weights a group was begun with and those it trains."""
    in_flight: Literal["finish", "drop"] = "finish"
    """What becomes of rollouts that are being played when new weights arrive: they end on the old ones, or are dropped
    as soon as they are too old."""


class EpisodeRollouts(Config):
    """For `rollouts: episodes`. docs/training.md has more."""

    run: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:#/-]{1,128}$")
    """What the server calls it, and players claim from. Default: the name of the run's folder."""
    players: NonNegativeInt = 32
    """Episodes that this process plays itself at a time, with its own environments. 0: all players are elsewhere."""
    lease_s: PositiveFloat = 60.0
    """How long a player may be silent before its episode is given to another."""
    max_attempts: PositiveInt = 3
    """Attempts that may be lost before an episode is parked."""
    on_loss: Literal["replace", "shrink", "drop"] = "replace"
    """What a group does about an episode that is parked: another one, go on with fewer, or give up the group."""
    oversample: NonNegativeInt = 0
    """Episodes of a group beyond `rollout.group_size`. When so many as that have ended, the rest is cancelled."""
    deadline_s: PositiveFloat | None = None
    """Time limit of a group: what is not played by then is lost."""


class TrackerConfig(Config):
    """An experiment tracker that gets the metrics of every step."""

    kind: Literal["wandb", "mlflow", "tensorboard"]
    """Which tracker; install it first: `pip install 'palestra[trackers]'`."""
    options: JsonObject = Field(default={})
    """As the tracker's own init takes them."""


class RunConfig(Config):
    """What every kind of run has."""

    name: str | None = None
    """Folder in `runs`. Default: kind, time."""
    runs: Folder = Path("runs")
    """Where the folders of runs are made."""
    seed: int = 0
    """Fixes the order of tasks or rows, the adapter's first weights, and the seed of every sample."""
    steps: PositiveInt = 50
    """Training steps of the whole run."""
    server: str | None = None
    """Address of a Tinker API. None: a server of its own, for this run, in the run's folder."""
    server_patience_s: PositiveFloat = 120.0
    """A server that cannot be reached for so long ends the run; it can be resumed."""
    alias: str | None = Field(default="policy", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """The `model` by which others sample the newest weights at the server's model endpoint, during the run and after
    it. Runs that share a server each need their own. None: no name. A server without aliases does without."""
    model: TrainModel = TrainModel()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trackers: list[TrackerConfig] = Field(default=[])
    """Where metrics go besides the run's folder."""


class ImitationConfig(Config):
    """For a model that solves none of its tasks: it learns from solutions first. docs/training.md has more."""

    data: list[Annotated[str, AfterValidator(_conversations)]] = Field(min_length=1)
    """Files of conversations, as `kind: sft` has them; or `platform:…`, for the platform's own solutions of these
    tasks."""
    steps: PositiveInt = 100
    """Optimizer steps, before the first step of GRPO."""
    batch_size: PositiveInt = 32
    """Conversations of an optimizer step."""
    optimizer: OptimizerConfig = OptimizerConfig()


class GrpoConfig(RunConfig):
    kind: Literal["grpo"] = "grpo"
    """Reinforcement learning with groups of rollouts."""
    environments: list[EnvironmentEntry] = Field(min_length=1)
    """What is played; several are mixed by their weights."""
    imitation: ImitationConfig | None = None
    """What to imitate before the first step."""
    rollout: RolloutConfig = RolloutConfig()
    data: DataConfig = DataConfig()
    penalty: PenaltyConfig = PenaltyConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    eval: EvalConfig = EvalConfig()
    early_stop: EarlyStop | None = None
    asynchronous: AsyncConfig = AsyncConfig()
    rollouts: Literal["local", "episodes"] = "local"
    """local: played in this process. episodes: registered at the server, for players anywhere (`episodes`)."""
    episodes: EpisodeRollouts = EpisodeRollouts()
    keep_tokens: bool = True
    """Write every rollout's tokens and logprobs beside its text."""

    @model_validator(mode="after")
    def _fits(self) -> GrpoConfig:
        if self.early_stop is not None and not self.eval.every:
            raise ValueError("early_stop looks at evaluations, and eval.every is 0: there are none")
        if self.rollout.group_size == 1:
            raise ValueError("rollout.group_size is 1: a group of one has no baseline; make it 2 or more")
        self._check_episodes()
        check_gyms(self.environments, self.rollouts, self.rollout.style)
        return self

    def _check_episodes(self) -> None:
        if self.rollouts == "local":
            if self.episodes != EpisodeRollouts():
                raise ValueError("there are settings of episodes, but rollouts is local; set rollouts=episodes")
            return
        if self.rollout.style == "batched":
            raise ValueError("rollout.style is batched: episodes go each at its own speed; make it async")
        if self.server is None and not self.episodes.players:
            raise ValueError(
                "episodes.players is 0, and nobody else finds a server that a run starts for itself: give the address "
                "of one that runs (server=http://…), or let this run play (episodes.players=32)"
            )


class SftConfig(RunConfig):
    kind: Literal["sft"]
    """Supervised fine-tuning on conversations."""
    data: File
    """JSONL: `messages` (and `tools`) in each line."""
    eval_data: File | None = None
    """JSONL of held-out conversations, for `eval/loss`."""
    batch_size: PositiveInt = 32
    """Conversations of an optimizer step."""
    max_sequence_length: TokenLimit = 4096
    """Tokens of a row; what is longer loses its end."""
    train_on: Literal["all_assistant", "last_assistant"] = "all_assistant"
    """Learn from all turns of the assistant, or from the last one only."""
    eval_every: NonNegativeInt = 10
    """Steps between evaluations on `eval_data`; 0: never."""


class DpoConfig(RunConfig):
    kind: Literal["dpo"]
    """Direct preference optimisation on pairs of answers."""
    data: File
    """JSONL: `prompt` (messages), `chosen` and `rejected` (text or messages) in each line."""
    batch_size: PositiveInt = 16
    """Pairs."""
    beta: PositiveFloat = 0.1
    """How strongly the policy is kept near the reference."""
    max_sequence_length: TokenLimit = 4096
    """Tokens of an answer with its prompt; what is longer loses its end."""


KINDS: dict[str, type[RunConfig]] = {"grpo": GrpoConfig, "sft": SftConfig, "dpo": DpoConfig}


def load_train_config(
    files: Iterable[str | Path], overrides: Iterable[str], saved: JsonObject | None = None
) -> RunConfig:
    """The config of the kind it names; grpo where it names none. `saved`: the config of a run to go on with, below
    all files."""
    layers = Layers()
    if saved is not None:
        layers.merge(saved, "the run's own config")
    merge_layers(layers, files, overrides)
    kind = layers.data.get("kind", "grpo")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        raise ConfigError([f"unknown kind {kind!r} of training run; {hint}"])
    return validate(KINDS[kind], layers)
