"""Settings of branching: rollouts that go on from one turn in several ways."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from palestra.config.base import Config

TurnNumber = Annotated[int, Field(ge=2)]


class BranchConfig(Config):
    """Forks of a rollout: from the state before a turn it is played on in other ways, on a copy of the world, so that
    every turn gets an advantage of its own. See docs/grpo.md."""

    at: Literal["off", "uncertain", "each_turn", "fixed"] = "off"
    """Before which turns a rollout is forked. uncertain: those of its turns in which what it said was least likely.
    each_turn: all of them. fixed: those of `turns`. Before the first turn the group's other rollouts are the forks."""
    width: PositiveInt = 2
    """Number of forks at each of these turns, beside the rollout's own continuation."""
    points: PositiveInt = 2
    """uncertain: number of turns at which a rollout is forked."""
    turns: list[TurnNumber] = Field(default=[])
    """fixed: numbers of the turns, from 2 on."""
    budget: PositiveInt | None = None
    """Tokens that the forks of one rollout may sample. A fork is expected to sample as much as the rollout itself from
    that turn on; turns are chosen as long as they fit, with `each_turn` in a random order. None: no limit."""

    replay: bool = False
    """Where a world cannot be copied: make another one for the task and repeat the turns before the fork in it. A fork
    in which it answers otherwise than before is not played. Only for worlds of the task's own, since everything that
    was done in them is done again."""

    @property
    def is_on(self) -> bool:
        return self.at != "off"

    @model_validator(mode="after")
    def _names_turns(self) -> BranchConfig:
        if (self.at == "fixed") != bool(self.turns):
            raise ValueError("`at: fixed` and `turns`, such as [2, 5], need each other")
        return self
