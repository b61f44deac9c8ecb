"""Games of TextArena, for one player or for two.

Games draw from Python's global random numbers. Each episode has a state of its own, which is put in place for each call
into its game: a task is the same game, however many are played at once.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, ClassVar, Literal

import msgspec

from palestra.environments.errors import UnknownEnvironment
from palestra.environments.named_imports import import_named
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from palestra.environments.textarena_opponents import EndpointOpponent, Opponent, random_move
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload
from palestra.util.suggest import did_you_mean

PACKAGE = "textarena"
GAMES = {"train": range(1000), "eval": range(1_000_000, 1_000_100)}
"""Seeds of the games of each split."""
RANDOM = "random"
_random_numbers = Lock()
"""Protects Python's global random numbers while a game has put its own in place."""


class TextArenaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    args: JsonObject = {}
    """Arguments of the game, such as the size of its board."""
    opponent: EndpointOpponent | str = RANDOM
    """For a game of two: `random` plays one of the moves that the game lists; or `package.module:function`; or a model
    at an endpoint, such as an older checkpoint of the run at its server."""
    seat: Literal[0, 1] | None = None
    """The seat of the policy. None: the first in games of even seeds, the second in odd ones."""
    only_wins: bool = False
    """Whether all but the full reward of 1 is worth 0: draws, losses, and what games give for a part."""
    system_prompt: str = ""


class TextArena(BaseTextEnv):
    """A game: the reward is the game's, from -1 to 1."""

    game: ClassVar[str] = ""
    max_turns = 50

    @classmethod
    def tasks(cls, split: Literal["train", "eval"], env_config: JsonMapping | None = None) -> list[JsonObject]:
        _settings(cls.game, env_config)
        return [{"id": f"game-{seed}", "prompt": f"Play {cls.game}.", "seed": seed} for seed in GAMES[split]]

    def __init__(self, env_config: Any = None, extras: JsonObject | None = None) -> None:
        super().__init__(env_config, extras)
        self._settings = _settings(self.game, env_config)
        self._numbers = random.Random(self.extras["seed"]).getstate()
        self._read: list[str] = []
        """What the policy has not read yet."""
        self._moves, self._refused = 0, 0

    def init(self, prompt: ConversationType) -> tuple[ConversationType, JsonObject]:
        with self._own_numbers():
            self._env, players = _started(self.game, self._settings.args, self.extras["seed"])
        seat = self._settings.seat
        self._seat = 0 if players == 1 else self.extras["seed"] % 2 if seat is None else seat
        self._opponent = _opponent(self._settings.opponent) if players == 2 else None
        self._history: list[str] = []
        """What the opponent has read."""
        self._let_opponent_play()
        system = self._settings.system_prompt
        return [*([{"role": "system", "content": system}] if system else []), *self._observations()], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self._moves += 1
        with self._own_numbers():
            done, _ = self._env.step(action=action)
        if not done:
            self._let_opponent_play()
        state = self._env.state
        if not state.done:
            is_last = self.turns >= self.max_turns  # a game that has no end is a draw
            return BaseTextEnvStepOutput(
                observations=[] if is_last else self._observations(), reward=0.0, done=is_last, metadata={}
            )
        return BaseTextEnvStepOutput(observations=[], reward=self._reward(), done=True, metadata=self.get_verdict())

    def get_metrics(self) -> JsonPayload:
        info = self._env.state.game_info[self._seat]
        return {"moves": self._moves, "parse_error": float(bool(info.get("invalid_move")))}

    def get_verdict(self) -> JsonPayload:
        state = self._env.state
        reasons = [str(info["reason"]) for info in state.game_info.values() if info.get("reason")]
        return {"seat": self._seat, "reason": reasons[0] if reasons else ""}

    def _reward(self) -> float:
        reward = float((self._env.state.rewards or {}).get(self._seat, 0.0))
        return float(reward >= 1) if self._settings.only_wins else reward

    def _check_opponent(self) -> None:
        """A model may break the rules, and loses then; a function that does says nothing about the policy."""
        info = self._env.state.game_info[1 - self._seat]
        if info.get("invalid_move") and not isinstance(self._opponent, EndpointOpponent):
            raise RuntimeError(
                f"the opponent {self._settings.opponent!r} cannot play {self.game} ({info.get('reason')}); name a "
                "function that can: config.opponent=package.module:function"
            )

    def _let_opponent_play(self) -> None:
        """Plays until it is the policy's turn; everything it may read is collected."""
        while True:
            with self._own_numbers():
                player, messages = self._env.get_observation()
            lines = _lines(messages, self._env.state)
            if player == self._seat or self._env.state.done:
                self._read += lines
                return
            assert self._opponent is not None
            self._history += lines
            move = self._opponent(self._history, random.Random(f"{self.extras['seed']}/{len(self._history)}"))
            with self._own_numbers():
                self._env.step(action=move)
            self._check_opponent()

    def _observations(self) -> ConversationType:
        text, self._read = "\n".join(self._read), []
        return [{"role": "user", "content": text}]

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        with _random_numbers:
            outside = random.getstate()
            random.setstate(self._numbers)
            try:
                yield
            finally:
                self._numbers = random.getstate()
                random.setstate(outside)


@cache
def environment(name: str) -> type[TextArena]:
    """Returns the class of a game. Raises UnknownEnvironment."""
    games = _registry()
    if name not in games:
        raise UnknownEnvironment(f"TextArena has no game {name!r}; {did_you_mean(name, sorted(games))}")
    return type(name, (TextArena,), {"game": name, "__doc__": f"{name}: the reward is the game's, from -1 to 1."})


def _registry() -> dict[str, Any]:
    try:
        return importlib.import_module(f"{PACKAGE}.envs.registration").ENV_REGISTRY
    except ModuleNotFoundError as error:
        raise UnknownEnvironment(
            f"games of TextArena need {error.name}; to install: pip install 'palestra[textarena]'"
        ) from None


def _settings(game: str, config: JsonMapping | None) -> TextArenaSettings:
    try:
        return msgspec.convert(dict(config or {}), TextArenaSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"{PACKAGE}:{game}: config: {error}") from None


def _started(game: str, args: JsonObject, seed: int) -> tuple[Any, int]:
    """Returns the game without what TextArena puts around its observations, and the number of its players."""
    package, games = importlib.import_module(PACKAGE), _registry()
    raw = f"{game}-raw" if f"{game}-raw" in games else game
    env = package.make(raw, **args)
    for wrapper in games[game].default_wrappers or ():
        if issubclass(wrapper, package.ActionWrapper):
            env = wrapper(env)
    refused: Exception | None = None
    for players in (1, 2):
        try:
            env.reset(num_players=players, seed=seed)
        except (AssertionError, ValueError) as error:  # games say either where the number of players is wrong
            refused = error
            continue
        return env, players
    raise ValueError(f"{PACKAGE}:{game} cannot begin with one player or two ({refused})") from refused


def _lines(messages: Sequence[tuple[int, str, Any]], state: Any) -> list[str]:
    names = {-1: "GAME", **{player: f"Player {player}" for player in range(state.num_players)}}
    return [f"[{names.get(player, player)}] {text}" for player, text, _ in messages]


def _opponent(named: EndpointOpponent | str) -> Opponent:
    if isinstance(named, EndpointOpponent):
        return named
    if named == RANDOM:
        return random_move
    found: Callable[..., Any] = import_named(named, "function")
    return found
