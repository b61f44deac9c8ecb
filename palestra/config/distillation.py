"""Settings of on-policy distillation: who teaches, and how much of what they say counts.

Owns: keys, defaults, bounds. Never touches: models, the network.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from palestra.config.base import Config, Folder
from palestra.config.environment_entries import EnvironmentEntry
from palestra.util.suggest import did_you_mean

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


class TeacherConfig(Config):
    """A model that scores what the student samples. Its tokenizer must be the student's."""

    model: str
    """A checkpoint of a run (RUN, RUN@STEP, RUN@best or RUN@last), a `tinker://…` path at the student's server, or a
    base model: by its name at that server, as a model folder, or as a Hugging Face id in the local cache. With
    `endpoint`: the name of the model there."""
    endpoint: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """Address of an OpenAI-compatible endpoint whose completions return `prompt_logprobs`, such as
    http://127.0.0.1:8000/v1 of Palestra or vLLM."""
    key_env: str | None = Field(default=None, pattern=VARIABLE)
    """Name of the environment variable with the key for `endpoint`."""
    environments: list[str] = Field(default=[])
    """Environments in which it teaches. Default: all that no other teacher names."""
    tokenizer: Folder | None = None
    """A folder with the teacher's tokenizer.json. Default: that of its base model; needed if that is not found."""


class DistillationConfig(Config):
    """How log-probabilities of teachers, and rewards, become advantages."""

    kl_weight: PositiveFloat = 1.0
    """Each sampled token's advantage is this times the teacher's logprob minus the student's (the negative reverse
    KL)."""
    kl_discount: float = Field(default=0.0, ge=0, le=1)
    """Above 0, what later tokens get also counts for earlier ones, times this for each token in between."""
    reward_weight: NonNegativeFloat = 0.0
    """Weight of the advantages that rewards give. 0: rewards are reported, and nothing is learned from them."""
    concurrency: PositiveInt = 64
    """Maximum number of calls at a time to an `endpoint`."""
    patience_s: PositiveFloat = 120.0
    """If an `endpoint` does not answer a call for this time, the run ends; it can be resumed."""


def teacher_by_environment(
    teachers: Sequence[TeacherConfig], environments: Sequence[EnvironmentEntry]
) -> dict[str, int]:
    """Returns the index of each environment's teacher. Raises ValueError if an environment has none, or two."""
    known = [entry.name for entry in environments]
    found: dict[str, int] = {}
    for index, teacher in enumerate(teachers):
        for name in teacher.environments:
            if name not in known:
                raise ValueError(
                    f"teachers[{index}].environments: the run has no environment {name!r}; {did_you_mean(name, known)}"
                )
            if name in found:
                raise ValueError(f"teachers[{index}].environments: {name!r} already has a teacher, {found[name]}")
            found[name] = index
    general = [index for index, teacher in enumerate(teachers) if not teacher.environments]
    if len(general) > 1:
        raise ValueError(
            f"teachers[{general[0]}] and teachers[{general[1]}] both teach everywhere; name the `environments` of one"
        )
    for name in known:
        if name not in found and not general:
            raise ValueError(f"environment {name!r} has no teacher; add one without `environments`, or name it in one")
        found.setdefault(name, general[0] if general else 0)
    return found
