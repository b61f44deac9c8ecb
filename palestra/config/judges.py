"""Settings of judges: models that grade rollouts by a rubric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from palestra.config.base import Config, File
from palestra.config.distillation import VARIABLE
from palestra.config.environment_entries import EnvironmentEntry
from palestra.types import MAX_TEMPERATURE
from palestra.util.suggest import did_you_mean

Fallback = Literal["stop", "ungraded", "lowest"]


class JudgeConfig(Config):
    """A model that grades rollouts by a rubric."""

    model: str
    """Name of the model at the endpoint."""
    endpoint: str = Field(pattern=r"^https?://\S+$")
    """Address of an OpenAI- or Anthropic-compatible endpoint, such as http://127.0.0.1:8000/v1 or
    https://api.openai.com/v1."""
    api: Literal["auto", "openai", "anthropic"] = "auto"
    """The API that it speaks. auto: Anthropic's where Anthropic is, OpenAI's everywhere else."""
    key_env: str | None = Field(default=None, pattern=VARIABLE)
    """Name of the environment variable with the key."""
    rubric: str | None = Field(default=None, min_length=1)
    """What makes an answer good, in words."""
    rubric_file: File | None = None
    """A file with the rubric, instead of `rubric`."""
    mode: Literal["score", "rank"] = "score"
    """score: each rollout gets a number. rank: the rollouts of a group are put into an order, best first."""
    lowest: float = 0.0
    """The worst score of the judge, which is a reward of 0."""
    highest: float = 10.0
    """The best score of the judge, which is a reward of 1."""
    shows: Literal["conversation", "answer"] = "conversation"
    """What the judge reads: the whole conversation, or the task and the last answer."""
    reference: str | None = None
    """Name of a field in the extras of tasks that is shown to the judge as the reference answer."""
    max_tokens: PositiveInt = 512
    """Maximum tokens of a judge's answer."""
    temperature: float = Field(default=0.0, ge=0, le=MAX_TEMPERATURE)
    """Sampling temperature of the judge."""
    attempts: PositiveInt = 2
    """How often it is asked before an answer without a verdict is an error."""
    patience_s: PositiveFloat = 120.0
    """How long a call is repeated that is not answered, or answered with an error that may pass."""
    concurrency: PositiveInt = 16
    """Maximum number of calls at a time."""
    max_calls: PositiveInt | None = 10_000
    """Maximum number of calls of a run, resumes included; what is in the cache costs none. None: no limit."""
    max_total_tokens: PositiveInt | None = None
    """Maximum number of tokens that all calls of a run read and write. None: no limit."""
    on_limit: Fallback = "stop"
    """What happens at these limits. stop: the run ends, and can be resumed with a higher limit. ungraded: rollouts get
    no reward and do not count. lowest: they get a reward of 0."""
    on_error: Fallback = "ungraded"
    """The same for rollouts that could not be judged: the endpoint failed, or gave no verdict."""
    cache: File | None = None
    """File in which answers are kept for other runs. Default: judge-cache.jsonl in the folder of the runs."""

    @model_validator(mode="after")
    def _makes_sense(self) -> JudgeConfig:
        if (self.rubric is None) == (self.rubric_file is None):
            raise ValueError("give a rubric, or a rubric_file, and not both")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest ({self.lowest:g}) must be below highest ({self.highest:g})")
        return self


def check_judges(
    judges: Mapping[str, JudgeConfig], environments: Sequence[EnvironmentEntry], group_size: int, size_key: str
) -> None:
    """Raises ValueError if an environment names a judge that does not exist, or cannot rank its groups."""
    for index, entry in enumerate(environments):
        if entry.reward is None:
            continue
        name = entry.reward.judge
        if name not in judges:
            hint = did_you_mean(name, judges) if judges else "name it in the section judges"
            raise ValueError(f"environments[{index}].reward: there is no judge {name!r}; {hint}")
        if judges[name].mode == "rank" and group_size < 2:
            raise ValueError(f"judges.{name} ranks the rollouts of a task; set {size_key} to 2 or more")


class JudgeSection(Config):
    """The part of a config that names judges."""

    judges: dict[str, JudgeConfig] = Field(default={})
    """Judges by name."""
