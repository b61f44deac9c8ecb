"""An OpenEnv server with an action of its own: a guess, which is right if the number occurs in it. Run it in a Python
that has openenv; its argument is the port."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn  # type: ignore[import-not-found]
from openenv.core.env_server.http_server import create_app  # type: ignore[import-not-found]
from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]


class Guess(Action):
    text: str


class Told(Observation):
    said: str = ""


class Guessing(Environment):
    """Guess a number from 100 to 999."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def reset(self, seed: Any = None, episode_id: Any = None, **_: Any) -> Told:
        self.number = random.Random(seed).randint(100, 999)
        return Told(said="Guess a number from 100 to 999.")

    def step(self, action: Guess, timeout_s: Any = None, **_: Any) -> Told:
        return Told(said="Over.", done=True, reward=float(str(self.number) in action.text.split()))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_app(Guessing, Guess, Told, max_concurrent_envs=20)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
