"""Opponents in games of TextArena: a player that draws its moves, a model at an endpoint."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from typing import Protocol

import httpx
import msgspec

from palestra.net.chat_apis import OpenAIChat

MOVE = re.compile(r"\[(?!GAME\]|Player \d+\])([^\[\]]{1,40})\]")
TIMEOUT_S = 120.0


class Opponent(Protocol):
    """Returns a move. `history` is all that the opponent has read, in order; `rng` depends on the task alone."""

    def __call__(self, history: Sequence[str], rng: random.Random) -> str: ...


def random_move(history: Sequence[str], rng: random.Random) -> str:
    """Draws one of the moves in brackets that the game has listed last."""
    for text in reversed(history):
        if moves := MOVE.findall(text):
            return f"[{rng.choice(moves)}]"
    raise ValueError(
        "this game lists no moves in brackets, of which the opponent 'random' draws one; name a function of yours: "
        "config.opponent=package.module:function"
    )


class EndpointOpponent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model at an endpoint with OpenAI's chat API."""

    base_url: str
    model: str
    """The model's name at the endpoint; at a server of ours also a checkpoint, `tinker://…/sampler_weights/…`, or the
    alias of a run, which is its newest weights."""
    api_key_var: str = ""
    """Variable of the environment that has its key."""
    temperature: float = 1.0
    max_tokens: int = 256

    def __call__(self, history: Sequence[str], rng: random.Random) -> str:
        api, key = OpenAIChat(), os.environ.get(self.api_key_var, "") or "none"
        options = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": rng.randrange(2**31)}
        body = api.body(self.model, [{"role": "user", "content": "\n".join(history)}], options)
        answer = httpx.post(f"{self.base_url}{api.path}", json=body, headers=api.headers(key), timeout=TIMEOUT_S)
        answer.raise_for_status()
        return api.answer(answer.json()).text
