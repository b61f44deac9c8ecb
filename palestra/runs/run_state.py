"""The state from which a run is resumed, as its checkpoints hold it."""

from __future__ import annotations

from pathlib import Path

import msgspec


class StateError(ValueError):
    """A checkpoint cannot be read; the message says which."""


class PassRate(msgspec.Struct):
    """The moving estimate of how often a task is solved, or tasks that share one."""

    estimate: float
    skips: int = 0
    """How often its turn came and was skipped, since it was last played."""


class DifficultyState(msgspec.Struct, kw_only=True):
    """What a run knows about the difficulty of its tasks."""

    rates: dict[str, PassRate] = {}
    """Estimates by task, or by what tasks share."""
    queue: list[int] = []
    """Positions of tasks that wait to be replayed."""
    replayed: dict[int, int] = {}
    """Positions at which another position's task is played, as far as they are not used yet."""
    replay_credit: float = 0.0
    """A task is replayed whenever this reaches 1."""


class RunState(msgspec.Struct, kw_only=True):
    step: int = 0
    """Number of steps done; also the version of the weights."""
    kept_steps: int = 0
    """Number of them that kept their gradient instead of an optimizer step: schedules do not count these."""
    position: int = 0
    """Position in the order of tasks or data."""
    pending: list[int] = []
    """Earlier positions that were begun and not used (asynchronous runs)."""
    address: str = ""
    """Address of weights and optimizer on the server."""
    is_borrowed: bool = False
    """The weights are another run's, from which this one was forked: they are saved as its own before anything else."""
    evaluated: int = -1
    """The last step whose weights were evaluated."""
    best: float | None = None
    """Best value of the metric that may end the run early."""
    evaluations_since_best: int = 0
    cursor: int = 0
    """Position in the log of played groups, if rollouts are episodes: everything up to it is in these weights, or set
    aside."""
    teachers: dict[str, str] = {}
    """Checkpoints that the names of teachers meant when the run began, such as RUN@12 for RUN@best."""
    reference: str = ""
    """Address of the weights that `penalty.kl` compares with; empty if they are the base model's."""
    difficulty: DifficultyState = msgspec.field(default_factory=DifficultyState)
    """Empty unless the config chooses tasks by their difficulty."""
    entropy_bonus: float | None = None
    """Coefficient of the entropy bonus as it was adapted so far; None if the config has no target for the entropy."""


def read_state(file: Path) -> RunState:
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunState)
    except (OSError, msgspec.DecodeError) as error:
        raise StateError(
            f"{file} cannot be read as a checkpoint ({error}); remove it to resume from an older one"
        ) from None
