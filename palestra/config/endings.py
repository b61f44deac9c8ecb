"""Rewards of rollouts that a limit has ended."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, FiniteFloat

from palestra.config.base import Config
from palestra.types.rollouts import RolloutStop
from palestra.util.renamed import AGENT_WORTHS


def _refuse_other_words(given: object) -> object:
    if isinstance(given, bool):
        raise ValueError(f"{str(given).lower()} is no reward; give grade, mask or a number")
    if isinstance(given, str) and given in AGENT_WORTHS:
        raise ValueError(f"{given!r} is now called {AGENT_WORTHS[given]!r}")
    return given


Worth = Annotated[Literal["grade", "mask"] | FiniteFloat, BeforeValidator(_refuse_other_words)]
"""`grade`: what its environment or verifier gives it as it stands. A number: that reward. `mask`: nothing is learned
from it."""


class EndingsConfig(Config):
    """What rollouts are worth that a limit has ended: `grade`, a reward such as 0, or `mask`. A rollout that is masked
    is left out of the batch; its reward, if it has one, still counts in the baseline."""

    max_turns: Worth = "grade"
    """The environment's limit on turns was reached."""
    length: Worth = "mask"
    """The last turn was cut at `rollout.max_tokens`. mask is DAPO's overlong filter."""
    context: Worth = "grade"
    """There was no room for another turn in `rollout.max_context`."""
    timeout: Worth = "mask"
    """`rollout.timeout_s` was over, or a limit that the player of the rollout has on its time."""
    tool_calls: Worth = "grade"
    """`rollout.max_tool_calls` was reached."""
    parse_failures: Worth = "grade"
    """`rollout.max_parse_failures` turns in a row could not be read."""

    def worth(self, stop: RolloutStop) -> Worth:
        """Returns what a rollout is worth that ended so; `grade` if no limit has ended it."""
        return getattr(self, stop, "grade")


class DistillEndingsConfig(EndingsConfig):
    """What rollouts are worth that a limit has ended, where a teacher scores them."""

    length: Worth = "grade"
    """A teacher can score a rollout whose last turn was cut."""
