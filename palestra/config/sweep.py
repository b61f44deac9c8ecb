"""The config of `palestra sweep`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from palestra.config.base import Config


class HalvingConfig(Config):
    """Successive halving: at each rung, a step that is evaluated, the worse settings end."""

    first: PositiveInt | None = None
    """Step of the first rung. Default: the first evaluation after the start."""
    factor: int = Field(default=2, ge=2)
    """A rung keeps one of this many settings, rounded up, and the next rung is this many times as far."""


class EvolveConfig(Config):
    """Population based training: at some steps, the worst runs go on from the best ones, with other settings."""

    every: PositiveInt | None = None
    """Steps between comparisons, rounded up to evaluations. Default: each evaluation."""
    share: float = Field(default=0.25, gt=0, le=0.5)
    """Share of the runs that are replaced, and of those that they take over from; at least one."""
    factor: float = Field(default=1.25, gt=1)
    """Numbers among the settings are multiplied or divided by this."""


class SweepConfig(Config):
    """A population of runs that differ in some settings and share one server."""

    config: str
    """The config of the runs, as for `palestra train`: a file, or the name of a bundled one."""
    set: dict[str, Any] = Field(default={})
    """Settings of all runs, by dotted keys such as `optimizer.lr`."""
    vary: dict[str, Any] = Field(min_length=1)
    """The values of each dotted key: a list, a range such as `0..7`, `loguniform(1e-5,1e-3)`, `uniform(0,1)` or
    `randint(1,8)`."""
    sample: PositiveInt | None = None
    """Number of settings that are drawn; each is run with every value of `seed`. None: all combinations."""
    sample_seed: int = 0
    """Fixes the draws of `sample`."""
    metric: str | None = None
    """The metric by which runs are compared. Default: `checkpoint.keep_best` if they are evaluated, else the reward,
    loss or accuracy of their training steps."""
    prune: Literal["halving"] | None = None
    """Ends runs early: `halving` is successive halving."""
    halving: HalvingConfig = HalvingConfig()
    evolve: EvolveConfig | None = None
    """Population based training. None: every run keeps its settings."""
    at_once: PositiveInt | None = None
    """Number of runs that train at the same time; the rest waits. Default: as many as fit into memory."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,55}$")
    """Name of the sweep's folder in `runs`, with which the names of its runs begin. Default: two words that are free
    there."""

    @model_validator(mode="after")
    def _is_one_rule(self) -> SweepConfig:
        if self.prune is not None and self.evolve is not None:
            raise ValueError("prune ends the worse runs, and evolve lets them go on from better ones; choose one")
        return self
