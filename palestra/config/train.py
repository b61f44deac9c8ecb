"""The config of `palestra train`."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from palestra.config.agents import AgentRollouts
from palestra.config.algorithm import AdvantageKind, AlgorithmConfig, FunctionName, PenaltyConfig
from palestra.config.base import Config, Dataset, Folder
from palestra.config.branching import BranchConfig
from palestra.config.bundled import EPHEBE
from palestra.config.card import CardConfig
from palestra.config.difficulty import DifficultyConfig
from palestra.config.distillation import DistillationConfig, TeacherConfig, teacher_by_environment
from palestra.config.endings import DistillEndingsConfig, EndingsConfig
from palestra.config.environment_entries import (
    EnvironmentEntry,
    check_coding,
    check_gyms,
    check_verifiers,
    is_verifiers_entry,
)
from palestra.config.errors import ConfigError
from palestra.config.judges import JudgeConfig, check_judges
from palestra.config.load import Layers, Override, merge_layers, validate
from palestra.config.update_guard import UpdateGuardConfig
from palestra.config.webhook import WebhookConfig
from palestra.types import MAX_TEMPERATURE
from palestra.types.gym import is_gym
from palestra.util.amounts import parse_amount
from palestra.util.json_types import JsonObject
from palestra.util.suggest import did_you_mean

TokenLimit = PositiveInt
PLATFORM = "platform:"


def _amount(text: str) -> str:
    parse_amount(text)
    return text


def _conversations(source: str) -> str:
    return source if source.startswith(PLATFORM) else str(Path(source).expanduser().absolute())


class TrainModel(Config):
    """The model to train, and the LoRA adapter on it."""

    name: str = EPHEBE
    """Name of the model at the server. Without `server`: a model folder, a Hugging Face id in the local cache, or a
    bundled one: `ephebe`, `ephebe-shell`."""
    tokenizer: Folder | None = None
    """A folder with tokenizer.json and a chat template. Default: the model's own; needed for a server on another
    machine."""
    rank: PositiveInt = 16
    """Rank of the LoRA adapter."""
    train_unembed: bool = True
    """Whether the adapter also trains the unembedding. A server that samples with vLLM refuses it."""
    start_from: str | None = None
    """A `tinker://…/weights/…` path to start from."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the server that this run starts for itself."""
    weights: Literal["bf16", "fp8", "int8", "int4", "nf4", "mxfp4"] | None = None
    """Form of the base weights at that server, in 8 or 4 bits; see docs/gpu.md. None: as stored, or what fits."""
    memory: Annotated[str, AfterValidator(_amount)] | None = None
    """How much of the device's memory that server may be planned for, such as 14GB, where other programs need some.
    None: all there is. A model of a gigabyte or more that does not fit gets settings with which it does."""


class RolloutConfig(Config):
    """How rollouts are played and sampled."""

    style: Literal["async", "batched"] = "async"
    """async: each rollout goes at its own speed. batched: all rollouts take their turns together."""
    group_size: PositiveInt = 8
    """Number of rollouts of each task, which are compared with each other."""
    groups_per_step: PositiveInt = 16
    """Number of tasks of a training step."""
    max_tokens: TokenLimit = 256
    """Maximum tokens of one turn."""
    max_context: TokenLimit = 4096
    """Maximum tokens of prompt and turns together; a rollout without room for another turn ends."""
    max_tool_calls: PositiveInt | None = None
    """Maximum number of tool calls; a rollout that has made them ends. For environments that report their calls."""
    max_parse_failures: PositiveInt | None = None
    """Maximum number of turns in a row that cannot be read; then a rollout ends. For environments that report them."""
    endings: EndingsConfig = EndingsConfig()
    oversample: NonNegativeInt = 0
    """Extra rollouts of a group beyond `group_size`. When `group_size` have ended without failing, the others are
    cancelled. It favours short ones, and two runs of one seed may differ. Episodes and agents have
    `episodes.oversample`."""
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
    concurrency: PositiveInt | None = None
    """Maximum number of rollouts at a time. None: as many as the server's engine can hold, by its free rows and pages;
    512 where the server does not say, and with `style: batched`."""
    env_threads: PositiveInt = 16
    """Threads for environments without async methods."""
    branch: BranchConfig = BranchConfig()


class DataConfig(Config):
    """How groups of rollouts become the rows of a batch."""

    max_sequence_length: TokenLimit = 4096
    """Maximum tokens of a row; longer rows lose their end."""
    zero_variance: Literal["refill", "drop", "keep"] = "refill"
    """Groups whose rewards are all equal teach nothing: play others instead, drop them, or keep them."""
    max_refills: NonNegativeInt = 2
    """Rounds of playing other groups, each for those still missing."""
    refill_ahead: bool = False
    """A round plays more groups than are missing, by the share of those played so far that teach something, and at most
    as many as a step has. Fewer rounds, in which a GPU has more to do; all that is played is trained on in the step.
    For synchronous runs: asynchronous ones play ahead anyway."""
    min_informative_groups: NonNegativeInt | None = None
    """A step with fewer groups whose rewards differ keeps its gradient for the next one instead of an optimizer step.
    Default: a quarter of `rollout.groups_per_step`, rounded up."""


class OptimizerConfig(Config):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat | Literal["auto"] = "auto"
    """Learning rate. auto: chosen at the start by the kind of run and the model's hidden size, whatever the rank, and
    saved as a number; see docs/grpo.md."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the root of that mean, to avoid a division by 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, times the learning rate."""
    grad_clip: NonNegativeFloat = 1.0
    """Limit on the global norm of the gradient; 0 is off."""
    warmup_steps: NonNegativeInt = 3
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate falls to zero at the last step; `constant`: it does not fall."""


class EvalConfig(Config):
    """Evaluation on held-out tasks."""

    every: NonNegativeInt = 10
    """Steps between evaluations; 0: no evaluations. Otherwise there is also one before the first and one after the last
    step."""
    tasks: PositiveInt = 100
    """Maximum number of tasks of each environment."""
    samples: PositiveInt = 1
    """Samples of each task; pass@k is reported up to this k."""
    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    """Sampling temperature of evaluations; 0 is greedy."""
    success: float = 1.0
    """A rollout with at least this reward counts as a success."""


class EarlyStop(Config):
    """When a run ends before its last step."""

    metric: str = "eval/success"
    """The metric of evaluations that decides."""
    at_least: float | None = None
    """Stop when the metric reaches this value."""
    patience: PositiveInt | None = None
    """Stop when the metric has not risen for this number of evaluations."""


class CheckpointConfig(Config):
    """When weights and optimizer are saved, and how many of them are kept."""

    every: PositiveInt = 5
    """Steps between checkpoints. The last step is always saved."""
    keep: PositiveInt = 3
    """Number of newest checkpoints to keep; older ones are deleted from the server."""
    keep_best: str | None = "eval/success"
    """The metric of evaluations by which the best weights are kept beside the newest: the best so far are saved even if
    `every` does not make them due, and deleted when better ones come. Of a loss, less is better. None: the newest are
    kept only."""
    select: Literal["best", "last"] = "best"
    """The weights that a finished run stands for, as `final`, by its alias, and by its name in commands: the best by
    `keep_best` if evaluations ran, or the last. A resume goes on from the last step in any case."""

    @field_validator("keep_best")
    @classmethod
    def _is_of_evaluations(cls, metric: str | None) -> str | None:
        if metric is not None and not metric.startswith("eval/"):
            raise ValueError(f"{metric!r} is no metric of evaluations; name one that begins with eval/, or null")
        return metric


class SftCheckpointConfig(CheckpointConfig):
    """When weights and optimizer of SFT are saved, and how many of them are kept."""

    keep_best: str | None = "eval/loss"
    """The metric of evaluations on `eval_data` by which the best weights are kept beside the newest. None: the newest
    are kept only."""


WHOLE_SEQUENCE = ("gspo", "gmpo")
"""Losses with one ratio for each sequence."""


class AsyncConfig(Config):
    """Playing the next rollouts while the update runs."""

    enabled: bool = False
    """Play while training, on weights that may be older by `max_staleness` versions."""
    max_staleness: NonNegativeInt = 1
    """Maximum difference, in weight versions, between the weights a group was started with and those it trains."""
    in_flight: Literal["finish", "drop", "continue"] = "finish"
    """What happens to running rollouts when new weights arrive: they finish on the old weights, are dropped as soon as
    they are too old, or continue with the new ones, in the middle of a turn too. Of one that continues, `max_staleness`
    bounds each token: a step trains those that are young enough, and waits for no rollout."""
    older_keys: Literal["recompute", "keep"] = "recompute"
    """What happens to the keys and values that older weights have computed for a turn that continues: they are computed
    anew, or kept, which costs nothing and makes the log-probabilities of the rest of the turn inexact."""

    @model_validator(mode="after")
    def _has_effect(self) -> AsyncConfig:
        if self.in_flight == "continue" and not self.enabled:
            raise ValueError("in_flight=continue is for runs that play while they train; set asynchronous.enabled=true")
        if self.older_keys == "keep" and self.in_flight != "continue":
            raise ValueError("older_keys is for rollouts that continue; set asynchronous.in_flight=continue")
        return self

    @property
    def continues(self) -> bool:
        """Whether rollouts outlive the weights that they began with."""
        return self.enabled and self.in_flight == "continue"


class EpisodeRollouts(Config):
    """Settings for `rollouts: episodes`. See docs/training.md."""

    run: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:#/-]{1,128}$")
    """Name of the run at the server, from which players claim. Default: the name of the run's folder."""
    players: NonNegativeInt = 32
    """Episodes that this process plays itself at a time, with its own environments. 0: all players are elsewhere."""
    lease_s: PositiveFloat = 60.0
    """How long a player may be silent before its episode is given to another."""
    max_attempts: PositiveInt = 3
    """Attempts that may be lost before an episode is parked."""
    on_loss: Literal["replace", "shrink", "drop"] = "replace"
    """What a group does about a parked episode: replace it by another one, continue with fewer, or give up the
    group."""
    oversample: NonNegativeInt = 0
    """Extra episodes of a group beyond `rollout.group_size`. When `group_size` episodes have ended, the others are
    cancelled."""
    deadline_s: PositiveFloat | None = None
    """Time limit of a group; episodes that are not played by then are lost."""


class TrackerConfig(Config):
    """An experiment tracker that gets the metrics of every step."""

    kind: Literal["wandb", "mlflow", "tensorboard", "trackio"]
    """Which tracker; install it first: `pip install 'palestra[trackers]'`."""
    options: JsonObject = Field(default={})
    """Arguments of the tracker's own init."""


class RunConfig(Config):
    """Settings of every kind of run."""

    name: str | None = None
    """Name of the run's folder in `runs`. Default: two words that are free there."""
    runs: Folder = Path("runs")
    """Folder in which the runs' folders are made."""
    seed: int = 0
    """Fixes the order of tasks or rows, the adapter's first weights, and the seed of every sample."""
    steps: PositiveInt = 50
    """Training steps of the whole run."""
    server: str | None = None
    """Address of a Tinker API. None: a server is started for this run, with its state in the run's folder."""
    server_patience_s: PositiveFloat = 120.0
    """If the server cannot be reached for this time, the run ends; it can be resumed."""
    alias: str | None = Field(default="policy", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """The `model` by which others sample the run's weights at the server's model endpoint: the newest during the run,
    those of `checkpoint.select` after it. Runs that share a server each need their own. None: no alias. Ignored if the
    server has no aliases."""
    model: TrainModel = TrainModel()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trackers: list[TrackerConfig] = Field(default=[])
    """Where metrics go besides the run's folder."""
    webhook: WebhookConfig | None = None
    card: CardConfig = CardConfig()


class ImitationConfig(Config):
    """Imitation of solutions before GRPO, for a model that solves none of its tasks. See docs/training.md."""

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
    """The environments to play; several are mixed by their weights."""
    judges: dict[str, JudgeConfig] = Field(default={})
    """Models that grade rollouts, by the names that `environments[].reward` uses."""
    imitation: ImitationConfig | None = None
    """Solutions to imitate before the first step."""
    reward: FunctionName | None = None
    """A function of one's own, `package.module:function`, that is called with each rollout that was graded in training
    and returns its reward, in place of the environment's. Evaluations keep the environment's. None: there is none."""
    rollout: RolloutConfig = RolloutConfig()
    data: DataConfig = DataConfig()
    difficulty: DifficultyConfig | None = None
    """Chooses tasks by how often they are solved. None: all are played, in their order."""
    penalty: PenaltyConfig = PenaltyConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    update_guard: UpdateGuardConfig = UpdateGuardConfig()
    eval: EvalConfig = EvalConfig()
    early_stop: EarlyStop | None = None
    asynchronous: AsyncConfig = AsyncConfig()
    rollouts: Literal["local", "episodes", "agent"] = "local"
    """local: played in this process. episodes: registered at the server, for players anywhere (`episodes`). agent: the
    same for coding tasks, which an agent plays in sandboxes (`agent`)."""
    episodes: EpisodeRollouts = EpisodeRollouts()
    agent: AgentRollouts = AgentRollouts()
    keep_tokens: bool = True
    """Write every rollout's tokens and logprobs beside its text."""

    @model_validator(mode="before")
    @classmethod
    def _played_by_verifiers(cls, given: Any) -> Any:
        """Sets `rollouts: episodes` where verifiers plays: the server keeps the tokens of its calls."""
        entries = given.get("environments") if isinstance(given, dict) else None
        if not isinstance(entries, list) or "rollouts" in given or not any(map(is_verifiers_entry, entries)):
            return given
        return {**given, "rollouts": "episodes"}

    @property
    def learns_from_rewards(self) -> bool:
        return True

    @property
    def min_informative_groups(self) -> int:
        """Number of informative groups below which a step keeps its gradient."""
        if self.data.zero_variance == "keep":
            return 0
        stated = self.data.min_informative_groups
        return -(-self.rollout.groups_per_step // 4) if stated is None else stated

    @model_validator(mode="after")
    def _fits(self) -> GrpoConfig:
        if self.early_stop is not None and not self.eval.every:
            raise ValueError("early_stop needs evaluations, but eval.every is 0; set it to 1 or more")
        if self.rollout.group_size == 1 and self.learns_from_rewards:
            raise ValueError("rollout.group_size is 1, but a group of one has no baseline; set it to 2 or more")
        self._check_episodes()
        check_judges(self.judges, self.environments, self.rollout.group_size, "rollout.group_size")
        check_gyms(self.environments, self.rollouts, self.rollout.style)
        check_coding(self.environments, self.rollouts)
        check_verifiers(self.environments, self.rollouts)
        self._check_limits()
        is_elsewhere = self.rollouts != "local" or any(is_gym(entry.name) for entry in self.environments)
        if self.algorithm.replay_routing and is_elsewhere:
            raise ValueError(
                "algorithm.replay_routing needs rollouts that are played in this process, not episodes or a gym"
            )
        if self.asynchronous.continues:
            self._check_continuing()
        if self.rollout.branch.is_on:
            self._check_branching()
        if self.rollout.oversample and (self.rollouts != "local" or self.rollout.style != "async"):
            raise ValueError(
                "rollout.oversample needs rollouts that are played in this process, each at its own speed; for "
                "episodes and agents set episodes.oversample"
            )
        return self

    def _check_limits(self) -> None:
        """Refuses limits that would never end a rollout: tool calls and failures of gyms and agents are not counted."""
        if self.rollouts != "agent" and not all(is_gym(entry.name) for entry in self.environments):
            return
        instead = "agent.timeout_s" if self.rollouts == "agent" else "max_steps of the gym's agent"
        for name in ("max_tool_calls", "max_parse_failures"):
            if getattr(self.rollout, name) is not None:
                raise ValueError(f"rollout.{name} has no effect on what is played here; set {instead}")

    def _check_continuing(self) -> None:
        if self.rollout.style == "batched":
            raise ValueError(
                "asynchronous.in_flight: continue needs rollouts that each go at their own speed; set "
                "rollout.style=async"
            )
        if gym := next((entry.name for entry in self.environments if is_gym(entry.name)), None):
            raise ValueError(
                f"asynchronous.in_flight: continue does not go with {gym}: the servers of a gym do not say which "
                "weights sampled which token; set asynchronous.in_flight=finish"
            )
        if self.algorithm.loss in WHOLE_SEQUENCE:
            raise ValueError(
                f"algorithm.loss: {self.algorithm.loss} has one ratio for a whole sequence, and with "
                "asynchronous.in_flight: continue several versions of the weights may have sampled it; use ppo, cispo "
                "or sapo, whose ratios are of tokens"
            )
        if self.algorithm.replay_routing and self.asynchronous.older_keys == "recompute":
            raise ValueError(
                "algorithm.replay_routing needs the experts that each token visited when it was sampled, and computing "
                "keys and values anew (asynchronous.older_keys: recompute) visits others; set "
                "asynchronous.older_keys=keep, or asynchronous.in_flight=finish"
            )

    def _check_branching(self) -> None:
        if self.rollouts != "local" or self.rollout.style != "async":
            raise ValueError(
                "rollout.branch needs rollouts that are played in this process, each at its own speed "
                "(rollouts: local, rollout.style: async)"
            )
        if not self.learns_from_rewards:
            raise ValueError(
                "rollout.branch compares rewards, and nothing is learned from them here; set "
                "distillation.reward_weight above 0"
            )
        if self.algorithm.advantage in (AdvantageKind.BATCH_STD, AdvantageKind.REINFORCE_PP, AdvantageKind.GDPO):
            raise ValueError(
                f"rollout.branch compares what follows from one state, and advantage {self.algorithm.advantage} "
                "compares whole steps; use mean_baseline, leave_one_out, grpo, dr_grpo, maxrl or pass_at_k"
            )
        if self.algorithm.turns.is_on:
            raise ValueError("rollout.branch gives each turn an advantage, and so does algorithm.turns; use one")
        if self.algorithm.shuffle_rewards:
            raise ValueError("algorithm.shuffle_rewards shuffles rewards of rollouts; their forks would reveal them")

    @property
    def players(self) -> int:
        """Number of episodes that this process plays at a time."""
        return self.agent.concurrency if self.rollouts == "agent" else self.episodes.players

    def _check_episodes(self) -> None:
        if self.rollouts != "agent" and self.agent != AgentRollouts():
            raise ValueError(f"there are settings for an agent, but rollouts is {self.rollouts}; set rollouts=agent")
        if self.rollouts == "local":
            if self.episodes != EpisodeRollouts():
                raise ValueError("there are settings for episodes, but rollouts is local; set rollouts=episodes")
            return
        if self.rollout.style == "batched":
            raise ValueError("episodes cannot be batched, since each goes at its own speed; set rollout.style=async")
        if self.server is None and not self.players:
            setting = "agent.concurrency" if self.rollouts == "agent" else "episodes.players"
            raise ValueError(
                f"{setting} is 0, and other players cannot find a server that a run starts for "
                "itself; give the address of a running server (server=http://…), or let this run play "
                f"({setting}=4)"
            )


class DistillDataConfig(DataConfig):
    """How rollouts that a teacher scores become the rows of a batch."""

    zero_variance: Literal["refill", "drop", "keep"] = "keep"
    """Groups whose rewards are all equal still have a teacher's advantages: keep them. If rewards count, they can be
    dropped, or others played instead."""


class DistillRolloutConfig(RolloutConfig):
    """How rollouts are played and sampled that a teacher scores."""

    endings: DistillEndingsConfig = DistillEndingsConfig()  # pyright: ignore[reportIncompatibleVariableOverride] (configs are frozen)


class DistillConfig(GrpoConfig):
    """Settings of a distillation: those of GRPO, and teachers."""

    kind: Literal["distill"] = "distill"  # pyright: ignore[reportIncompatibleVariableOverride] (configs are frozen)
    """On-policy distillation: the student samples, teachers score its tokens."""
    teachers: list[TeacherConfig] = Field(min_length=1)
    """The models to learn from, each in its environments."""
    distillation: DistillationConfig = DistillationConfig()
    rollout: DistillRolloutConfig = DistillRolloutConfig()  # pyright: ignore[reportIncompatibleVariableOverride] (as above)
    data: DistillDataConfig = DistillDataConfig()  # pyright: ignore[reportIncompatibleVariableOverride] (as above)

    @property
    def learns_from_rewards(self) -> bool:
        return self.distillation.reward_weight > 0

    @model_validator(mode="after")
    def _has_teachers(self) -> DistillConfig:
        teacher_by_environment(self.teachers, self.environments)
        if not self.distillation.is_sampled:
            self._check_divergence(self.distillation.loss)
        if not self.learns_from_rewards and self.data.zero_variance != "keep":
            raise ValueError(
                f"data.zero_variance is {self.data.zero_variance}, but nothing is learned from rewards; set it to "
                "keep, or distillation.reward_weight above 0"
            )
        return self

    def _check_divergence(self, name: str) -> None:
        """A divergence of whole distributions is a loss of its own: what changes advantages does not go with it."""
        algorithm = self.algorithm
        others = {
            "penalty.kl": self.penalty.kl,
            "algorithm.correction": algorithm.correction.is_on,
            "algorithm.observation_loss": algorithm.observation_loss,
            "algorithm.span_weight": algorithm.span_weight,
            "algorithm.entropy": algorithm.entropy.bonus or algorithm.entropy.target is not None,
            "algorithm.replay_routing": algorithm.replay_routing,
            "teachers[].own_tokenizer": any(teacher.own_tokenizer for teacher in self.teachers),
        }
        if found := next((setting for setting, is_on in others.items() if is_on), None):
            raise ValueError(f"{found} does not go with distillation.loss {name}; use loss: sampled")


class SftConfig(RunConfig):
    kind: Literal["sft"]
    """Supervised fine-tuning on conversations."""
    data: Dataset
    """JSONL or Parquet file with `messages` (and `tools`) in each row, or a hub dataset in the local cache:
    ORG/NAME:SPLIT."""
    eval_data: Dataset | None = None
    """The same with held-out conversations, for `eval/loss`."""
    batch_size: PositiveInt = 32
    """Conversations of an optimizer step."""
    max_sequence_length: TokenLimit = 4096
    """Maximum tokens of a row; longer rows lose their end."""
    train_on: Literal["all_assistant", "last_assistant"] = "all_assistant"
    """Learn from all turns of the assistant, or from the last one only."""
    eval_every: NonNegativeInt = 10
    """Steps between evaluations on `eval_data`; 0: never."""
    checkpoint: SftCheckpointConfig = SftCheckpointConfig()  # pyright: ignore[reportIncompatibleVariableOverride] (configs are frozen)


class PreferenceLoss(StrEnum):
    """How preferred answers are compared with others; formulas in docs/sft-and-dpo.md."""

    DPO = "dpo"
    IPO = "ipo"
    """As dpo, but the margin has an aim, so that it does not grow without end."""
    SIMPO = "simpo"
    """Without a reference: mean logprobs of the answers, and a margin that they should differ by."""
    ORPO = "orpo"
    """Without a reference: the chosen answer is learned as in SFT, and its odds are compared with the other's."""
    KTO = "kto"
    """Each answer by itself is desirable or not; rows need no pairs."""


class DpoConfig(RunConfig):
    kind: Literal["dpo"]
    """Preference optimisation: answers that are preferred become likelier than others."""
    loss: PreferenceLoss = PreferenceLoss.DPO
    """dpo, ipo, simpo and orpo compare the two answers of a pair; kto also reads rows with one labelled answer."""
    data: Dataset
    """JSONL or Parquet file with `prompt` (messages), `chosen` and `rejected` (text or messages) in each row, or a hub
    dataset in the local cache: ORG/NAME:SPLIT. For kto, rows may have `prompt`, `completion` and `label` (true: the
    answer is desirable) instead."""
    batch_size: PositiveInt = 16
    """Rows of an optimizer step."""
    beta: PositiveFloat | None = None
    """dpo, ipo, kto: how strongly the policy is kept near the reference. simpo: scale of the rewards. orpo: weight of
    the odds. Default: 0.1, for simpo 2."""
    target_margin: NonNegativeFloat = 1.0
    """simpo: by how much the reward of the chosen answer should be larger (gamma)."""
    desirable_weight: PositiveFloat = 1.0
    """kto: weight of desirable answers."""
    undesirable_weight: PositiveFloat = 1.0
    """kto: weight of the others."""
    max_sequence_length: TokenLimit = 4096
    """Maximum tokens of an answer with its prompt; longer ones lose their end."""


KINDS: dict[str, type[RunConfig]] = {
    "grpo": GrpoConfig,
    "distill": DistillConfig,
    "sft": SftConfig,
    "dpo": DpoConfig,
}


def load_train_config(
    files: Iterable[str | Path], overrides: Iterable[str | Override], saved: JsonObject | None = None
) -> RunConfig:
    """The config, of the kind that it names; grpo if it names none. `saved`: the config of a run to continue, over
    which the files are merged."""
    layers = Layers()
    if saved is not None:
        layers.merge(saved, "the run's own config")
    files = list(files)
    merge_layers(layers, files, overrides)
    if isinstance(theirs := layers.data.get("env"), dict) and "should_use_nemo_gym" in theirs:
        hint = f"palestra config from-nemo-rl {files[0]} > run.yaml" if files else "palestra config from-nemo-rl"
        raise ConfigError([f"this is a config of NeMo RL's; to translate it, type: {hint}"])
    kind = layers.data.get("kind", "grpo")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS)
        raise ConfigError([f"unknown kind {kind!r} of training run; {hint}"])
    return validate(KINDS[kind], layers)
