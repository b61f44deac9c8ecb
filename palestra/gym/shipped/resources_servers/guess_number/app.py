"""A game: find a hidden number; the answer to each guess is whether it was too low or too high."""

from __future__ import annotations

from msgspec import Struct

from palestra.environments.answer_text import last_number
from palestra.gym.servers.gymnasium import GymnasiumServer, Start, Step
from palestra.gym.servers.resources import ResourcesSettings
from palestra.gym.servers.responses import output_text
from palestra.gym.servers.states import Session
from palestra.util.json_types import JsonObject


class GuessGame(Struct):
    secret: int
    guesses_left: int
    guesses: int


class GuessNumber(GymnasiumServer[ResourcesSettings]):
    async def reset(self, session: Session, secret: int, low: int = 1, high: int = 100, guesses: int = 7) -> Start:
        session.state = GuessGame(secret, guesses, guesses)
        return Start(observation=f"I think of a number from {low} to {high}. You have {guesses} guesses. What is it?")

    async def step(self, session: Session, response: JsonObject) -> Step:
        game: GuessGame = session.state
        guess = _guess(output_text(response))
        game.guesses_left -= 1
        info = {"guesses_left": game.guesses_left}
        if guess == game.secret:
            # Fewer guesses are worth more; the last possible one is still worth half.
            reward = 0.5 + 0.5 * game.guesses_left / max(1, game.guesses - 1)
            return Step(reward=reward, terminated=True, info=info)
        if game.guesses_left <= 0:
            return Step(observation=f"No. It was {game.secret}.", terminated=True, info=info)
        return Step(observation=_hint(guess, game.secret), info=info)


def _guess(text: str) -> float | None:
    try:
        return float(last_number(text) or "")
    except ValueError:
        return None


def _hint(guess: float | None, secret: int) -> str:
    if guess is None:
        return "Say a number."
    return "Higher." if guess < secret else "Lower."
