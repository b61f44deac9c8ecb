"""Settings of on-policy distillation: who teaches, and how much of what they say counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from palestra.config.base import Config, Folder
from palestra.config.environment_entries import EnvironmentEntry
from palestra.util.suggest import did_you_mean

VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


SELF = "self"


class TeacherConfig(Config):
    """A model that scores what the student samples."""

    model: str
    """A checkpoint of a run (RUN, RUN@STEP, RUN@best or RUN@last), a `tinker://…` path at the student's server, or a
    base model: by its name at that server, as a model folder, or as a Hugging Face id in the local cache. With
    `endpoint`: the name of the model there. `self`: the student, with the weights that played; give it a `context`."""
    context: str | None = None
    """What the teacher is told and the student is not (self-distillation with privileged context: SDFT, OPSD): text
    that is added to the last message of the prompt, with fields of the task's extras, such as "The answer is
    {answer}."."""
    own_tokenizer: bool = False
    """The teacher reads the conversation in tokens of its own `tokenizer`. Its scores are aligned with the student's
    tokens by spans of text. Otherwise its tokenizer must be the student's."""
    endpoint: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """Address of an OpenAI-compatible endpoint whose completions return `prompt_logprobs`, such as
    http://127.0.0.1:8000/v1 of Palestra or vLLM."""
    key_env: str | None = Field(default=None, pattern=VARIABLE)
    """Name of the environment variable with the key for `endpoint`."""
    environments: list[str] = Field(default=[])
    """Environments in which it teaches. Default: all that no other teacher names."""
    tokenizer: Folder | None = None
    """A folder with the teacher's tokenizer.json. Default: that of its base model; needed if that is not found."""

    @model_validator(mode="after")
    def _makes_sense(self) -> TeacherConfig:
        if self.model == SELF and self.endpoint is None and self.context is None:
            raise ValueError("a teacher that is the student itself says nothing new; give it a context")
        if self.own_tokenizer and self.context is not None:
            raise ValueError("a teacher with own_tokenizer cannot have a context")
        if self.own_tokenizer and self.endpoint is not None and self.tokenizer is None:
            raise ValueError("a teacher with own_tokenizer at an endpoint needs its folder: tokenizer")
        return self


class DistillationConfig(Config):
    """How log-probabilities of teachers, and rewards, become a gradient."""

    loss: Literal["sampled", "forward_kl", "reverse_kl", "jsd"] = "sampled"
    """sampled: a policy gradient, by the teacher's logprob of each sampled token. The others are divergences of whole
    distributions at each sampled token, over the teacher's `top_k` tokens: forward_kl is KL(teacher || student),
    reverse_kl KL(student || teacher), jsd lies between them."""
    top_k: PositiveInt | Literal["all"] = 32
    """For divergences: number of the teacher's likeliest tokens; all others together count as one more outcome. all:
    the whole vocabulary."""
    jsd_weight: float = Field(default=0.5, gt=0, lt=1)
    """For jsd: the teacher's share b in the mixture m; the loss is b KL(teacher || m) + (1 - b) KL(student || m)."""
    kl_weight: PositiveFloat = 1.0
    """With `loss: sampled`, each sampled token's advantage is this times the teacher's logprob minus the student's (the
    negative reverse KL). Otherwise the weight of the divergence."""
    kl_discount: float = Field(default=0.0, ge=0, le=1)
    """Above 0, what later tokens get also counts for earlier ones, times this for each token in between."""
    reward_weight: NonNegativeFloat = 0.0
    """Weight of the advantages that rewards give. 0: rewards are reported, and nothing is learned from them."""
    concurrency: PositiveInt = 64
    """Maximum number of calls at a time to an `endpoint`."""
    patience_s: PositiveFloat = 120.0
    """If an `endpoint` does not answer a call for this time, the run ends; it can be resumed."""

    @property
    def is_sampled(self) -> bool:
        """Whether only the sampled tokens are scored, and not whole distributions."""
        return self.loss == "sampled"

    @model_validator(mode="after")
    def _is_one_loss(self) -> DistillationConfig:
        if not self.is_sampled and (self.reward_weight or self.kl_discount):
            raise ValueError(f"reward_weight and kl_discount are for `loss: sampled`, and not for {self.loss}")
        return self


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
