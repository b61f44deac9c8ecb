"""The settings of an audit."""

from __future__ import annotations

from msgspec import Struct


class AuditSettings(Struct, frozen=True, kw_only=True):
    """How much an audit plays, how long, and what counts as a success."""

    limit: int = 8
    """Maximum number of tasks that are played, half of them held-out ones."""
    seed: int = 0
    """Decides which tasks are played and what is said by chance."""
    timeout_s: float = 30.0
    """Time limit of one call into an environment, or of one episode that is played elsewhere."""
    within_s: float = 900.0
    """Time limit of the whole audit: what was not played by then is reported as such."""
    success: float = 1.0
    """Reward from which an episode counts as solved."""
    reward_range: tuple[float, float] | None = None
    """Smallest and largest reward of an episode. None: what the environment says, or 0 to 1."""
    skill: float = 0.5
    """Probability with which a rollout of a simulated group solves its task."""
    group_size: int = 8
    """Rollouts of a simulated group."""
    at_once: int = 16
    """Episodes that are played at the same time, to see whether they disturb each other."""
    in_a_row: int = 24
    """Episodes over which the memory of the process is watched; less than 6: it is not."""
    slow_s: float = 1.0
    """Seconds from which the median step counts as slow."""
    fresh_process: bool = True
    """Also list the tasks in a new process, whose hashes of texts differ."""
    ignored: frozenset[str] = frozenset()
    """Kinds of findings that are not reported."""
