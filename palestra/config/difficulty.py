"""Settings that choose tasks by how often they are solved."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from palestra.config.base import Config


class DifficultyConfig(Config):
    """Which tasks are worth playing, by moving estimates of how often each is solved."""

    lowest: float = Field(default=0.0, ge=0, le=1)
    """Tasks with an estimated pass rate below this are skipped: too hard for now."""
    highest: float = Field(default=1.0, ge=0, le=1)
    """Tasks with an estimated pass rate above this are skipped: there is nothing left to learn."""
    by: str = "task"
    """`task`: each task has an estimate of its own, for task sets that are played several times. Or the name of a field
    in the extras of tasks, such as `difficulty` or `level`: all tasks with the same value share one."""
    ema_decay: float = Field(default=0.5, ge=0, lt=1)
    """Decay of the moving estimates: the weight of the earlier estimate when a group was played; the rest is the
    group's own pass rate."""
    recheck_every: PositiveInt = 10
    """A task that is skipped is played anyway every so many times that its turn comes, since the policy changes."""
    success: float | None = None
    """A rollout with at least this reward has passed. Default: `eval.success`."""
    replay_share: NonNegativeFloat = Field(default=0.0, le=0.9)
    """Share of groups that play a task again which was solved, but hardly."""
    replay_passes: PositiveInt = 1
    """A task is replayed if at least one and at most this many rollouts of its group have passed."""
    replay_buffer_size: PositiveInt = 256
    """Maximum number of tasks that wait to be replayed; the oldest make room."""

    @model_validator(mode="after")
    def _has_a_band(self) -> DifficultyConfig:
        if self.lowest > self.highest:
            raise ValueError(f"lowest ({self.lowest:g}) must not be above highest ({self.highest:g})")
        return self
