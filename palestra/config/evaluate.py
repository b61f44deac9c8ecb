"""The config of `palestra eval`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from palestra.config.agents import AgentConfig
from palestra.config.base import Config, Folder
from palestra.config.bundled import EPHEBE
from palestra.config.environment_entries import EnvironmentEntry, check_gyms
from palestra.config.errors import ConfigError
from palestra.config.judges import JudgeConfig, check_judges
from palestra.config.load import Layers, merge_layers, read_file, validate
from palestra.types import MAX_TEMPERATURE
from palestra.types.gym import is_gym
from palestra.types.rollouts import CODING
from palestra.util.json_types import JsonObject
from palestra.util.renamed import with_new_keys


class EvaluationConfig(Config):
    kind: Literal["eval"] = "eval"
    name: str | None = None
    """Name of the evaluation's folder in `runs`. Default: two words that are free there."""
    runs: Folder = Path("runs")
    """Folder in which its folder is made, beside those of training runs."""
    seed: int = 0
    """Fixes the seed of every sample."""
    model: str = EPHEBE
    """Name of the model at the server. Without `server`: a model folder, a Hugging Face id in the local cache, the
    bundled `ephebe`, or the checkpoint of a training run: RUN, RUN@STEP, RUN@best or RUN@last."""
    server: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """Address of a model endpoint, such as http://127.0.0.1:8000, https://api.openai.com/v1 or
    https://api.anthropic.com. None: one is started for this evaluation."""
    api: Literal["auto", "openai", "anthropic"] = "auto"
    """API of that server: OpenAI's chat completions, or Anthropic's Messages (no seeds, so not repeatable). auto:
    Anthropic's at anthropic.com."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of a server that is started."""
    environments: list[EnvironmentEntry] = Field(min_length=1)
    """The environments to play, with their held-out tasks."""
    agent: AgentConfig | None = None
    """The command-line agent that plays the environment `coding`, at a server of Palestra."""
    judges: dict[str, JudgeConfig] = Field(default={})
    """Models that grade rollouts, by the names that `environments[].reward` uses."""
    tasks: PositiveInt = 100
    """Maximum number of tasks of each environment."""
    task_ids: list[str] | None = Field(default=None, min_length=1)
    """Play these tasks only: ids, or ENVIRONMENT/ID where several environments have the same. They are looked for among
    the training tasks, too."""
    samples: PositiveInt = 1
    """Samples of each task; pass@k is reported up to this k."""
    success: float = 1.0
    """A rollout with at least this reward counts as a success."""
    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    """Sampling temperature; 0 is greedy."""
    max_tokens: PositiveInt = Field(default_factory=lambda data: 256 if data.get("agent") is None else 4096)
    """Maximum tokens of one turn. Default: 256; of an agent's calls 4096."""
    max_context: PositiveInt = 4096
    """Maximum tokens of prompt and turns together; a rollout without room for another turn ends."""
    timeout_s: PositiveFloat = 600.0
    """Time limit of a whole rollout; of an agent's, `agent.timeout_s`."""
    env_timeout_s: PositiveFloat = 60.0
    """Time limit of one call into an environment."""
    concurrency: PositiveInt = 64
    """Maximum number of rollouts at a time."""
    max_failed: float = Field(default=0.5, ge=0, le=1)
    """If a larger share of the rollouts failed or could not be graded, `palestra eval` ends with exit code 5."""
    patience_s: PositiveFloat = 120.0
    """If the server does not answer a call for this time, the evaluation ends; it can be resumed."""

    @model_validator(mode="after")
    def _is_playable(self) -> EvaluationConfig:
        check_judges(self.judges, self.environments, self.samples, "samples")
        check_gyms(self.environments, "local", "async")
        if self.agent is None and any(entry.name == CODING for entry in self.environments):
            raise ValueError("coding tasks are played by an agent; name one: --agent shell (palestra agent list)")
        if self.agent is not None and not self.agent.concurrency:
            raise ValueError("agent.concurrency is 0, and an evaluation has no other players; set it to 1 or more")
        if self.api == "anthropic" and any(is_gym(entry.name) for entry in self.environments):
            raise ValueError("the servers of a gym call models by OpenAI's API; Anthropic's cannot be evaluated by one")
        return self


FROM_TRAINING: dict[str, tuple[str, ...]] = {
    "rollout": ("max_tokens", "max_context", "timeout_s", "env_timeout_s"),
    "eval": ("tasks", "samples", "success", "temperature"),
}
"""Settings that are taken over from the config of a training run, by section."""


def load_evaluation_config(
    environments: Sequence[JsonObject],
    files: Iterable[str | Path],
    overrides: Iterable[str],
    saved: JsonObject | None = None,
    defaults: JsonObject | None = None,
) -> EvaluationConfig:
    """`environments` are entries that are played besides those of the files, which may be configs of training runs.
    `saved`: the config of an evaluation to continue. `defaults` hold for keys that are not set."""
    layers = Layers()
    layers.merge(defaults or {}, "the benchmarks")
    if saved is not None:
        layers.merge(saved, "the evaluation's own config")
    for file in files:
        layers.merge(_evaluation_of(read_file(Path(file))), str(file))
    if environments:
        known = layers.data.get("environments", [])
        layers.merge({"environments": [*known, *environments]}, "the command line")
    merge_layers(layers, (), overrides)
    if not layers.data.get("environments"):
        raise ConfigError(["name an environment to play, or a config with some; to list them: palestra env list"])
    return validate(EvaluationConfig, layers)


def _evaluation_of(content: JsonObject) -> JsonObject:
    """Takes from the config of a training run what an evaluation needs; one of an evaluation stays as it is. The
    config.json of a run's folder has the config inside."""
    if isinstance(inner := content.get("config"), dict) and "facts" in content:
        content = {name: value for name, value in with_new_keys(inner).items() if name not in ("name", "runs")}
    if content.get("kind") == "eval":
        return content
    found: JsonObject = {name: content[name] for name in ("environments", "judges") if name in content}
    if content.get("rollouts") == "agent":
        found["agent"] = {name: value for name, value in (content.get("agent") or {}).items() if name != "train_on"}
    for section, names in FROM_TRAINING.items():
        given = content.get(section) or {}
        found |= {name: given[name] for name in names if name in given}
    return found
