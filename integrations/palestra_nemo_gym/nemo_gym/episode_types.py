"""Episodes as NeMo Gym's environment servers pass them on: who plays what, and what came of it."""

from __future__ import annotations

import re
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nemo_gym.failure_kinds import FailureStage

_ATTEMPT_SUFFIX = re.compile(r".*-a[1-9][0-9]*")
TaskInputT = TypeVar("TaskInputT", bound=BaseModel)
EpisodeResultT = TypeVar("EpisodeResultT")


class EpisodeModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EpisodeId(EpisodeModel):
    """One attempt at a rollout."""

    model_config = ConfigDict(frozen=True)

    rollout_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    attempt: int = Field(default=0, ge=0)

    @field_validator("rollout_id")
    @classmethod
    def _has_no_attempt(cls, rollout_id: str) -> str:
        if _ATTEMPT_SUFFIX.fullmatch(rollout_id):
            raise ValueError("a rollout_id does not end with -aN: that is said by `attempt`")
        return rollout_id

    @property
    def capture_key(self) -> str:
        """Under which its calls are recorded."""
        return f"{self.rollout_id}-a{self.attempt}" if self.attempt else self.rollout_id


class TaskId(EpisodeModel):
    model_config = ConfigDict(frozen=True)

    taskset: str = Field(min_length=1)
    task_id: str = Field(min_length=1)


class EpisodeFailure(EpisodeModel):
    failure_reason: str = Field(max_length=2000)
    terminal: bool
    """Not to be tried again."""
    failure_kind: str | None = None
    stage: FailureStage | None = None


class MaterializedTask(EpisodeModel, Generic[TaskInputT]):
    task_id: TaskId
    task_input: TaskInputT


class BaseEpisodeRequest(EpisodeModel, Generic[TaskInputT]):
    episode_id: EpisodeId
    task: MaterializedTask[TaskInputT]


class BaseEpisodeResponse(EpisodeModel, Generic[EpisodeResultT]):
    """A result or a failure."""

    episode_id: EpisodeId
    task_id: TaskId
    result: EpisodeResultT | None = None
    failure: EpisodeFailure | None = None

    @model_validator(mode="after")
    def _is_one_of_them(self) -> BaseEpisodeResponse[EpisodeResultT]:
        if (self.result is None) == (self.failure is None):
            raise ValueError("should have either a result or a failure")
        return self
