"""Settings of advantages for single turns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from palestra.config.base import Config


class TurnCreditConfig(Config):
    """Advantages of turns, by the rewards that came from a turn on; for environments that reward single turns. See
    docs/grpo.md."""

    compare: Literal["off", "turn", "state"] = "off"
    """What a turn is compared with, of the same group. turn: the turns with the same number. state: the turns that
    began with the same observation, wherever they stand (GiGPO)."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Share of the turn's advantage in that of its tokens; the rest is the rollout's."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """What a reward one turn later is worth."""

    @property
    def is_on(self) -> bool:
        return self.compare != "off"
