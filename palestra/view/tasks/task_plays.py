"""Tasks of the platform that people play by hand in the browser.

Plays end with the process, after an hour without a call, or when their owner begins too many.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from palestra.environments.platform import (
    APPS,
    Instance,
    PlatformError,
    PlatformTask,
    TaskApp,
    TaskVerdict,
    make_task,
    verify,
)
from palestra.environments.platform.changes import Change
from palestra.environments.platform.golden import SUBMIT
from palestra.environments.platform.scripted_user import HiddenFacts
from palestra.environments.platform.tasks import draw_task_key
from palestra.environments.platform.tool_schemas import ArgumentsSchema
from palestra.util.safe_text import safe_text

IDLE_S = 3600.0
MAX_PLAYS = 24  # a world has up to a few megabytes
MAX_OWN = 4
MAX_CALLS = 300
MAX_KEPT = 1 << 20  # characters of arguments and results of a play
ID_BYTES = 8


class NoSuchPlay(PlatformError, LookupError):
    """The play has ended, or belongs to another owner."""


class PlayLimit(PlatformError, ValueError):
    """Too much is played at once, or in one play."""


class TaskChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """The task to play: by its key, or by app, template and number; what is left out is drawn by chance."""

    task: str = ""
    app: str = ""
    template: str = ""
    number: int | None = None


class ListedTemplate(Struct, frozen=True):
    name: str
    difficulty: str
    max_turns: int
    prompt: str
    """One of its prompts, with the names of what is filled in."""


class ListedApp(Struct, frozen=True):
    key: str
    title: str
    description: str
    tools: int
    templates: list[ListedTemplate]


class PlayTool(Struct, frozen=True):
    name: str
    description: str
    parameters: ArgumentsSchema
    """JSON Schema of the arguments."""
    writes: bool


class PlayCall(Struct, frozen=True):
    tool: str
    arguments: object
    result: str
    """JSON, as the tool has returned it."""
    is_error: bool


class PlaySummary(Struct, frozen=True):
    id: str
    task: str
    prompt: str
    calls: int
    begun_at: float
    used_at: float


class PlayState(Struct, frozen=True, kw_only=True):
    """A play as it stands: the task, what was called, what has changed since the beginning, and the verdict on that."""

    id: str
    task: str
    app: str
    prompt: str
    variables: dict[str, str]
    """Variables of the world: who the player is, and the day."""
    max_turns: int
    """The turns that a model has."""
    asks_for_answer: bool
    tools: list[PlayTool]
    calls: list[PlayCall]
    """The oldest first."""
    answer: str | None
    changes: list[Change]
    user: HiddenFacts
    """The facts that only the user of the task knows, and what both said. A model does not see it."""
    verdict: TaskVerdict


@dataclass(slots=True)
class TaskPlay:
    id: str
    owner: str
    task: PlatformTask
    instance: Instance
    begun_at: float
    used_at: float
    calls: list[PlayCall] = field(default_factory=list)
    kept: int = 0
    """Characters of all arguments and results."""
    answer: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Protects calls and their order."""


class TaskPlays:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._plays: dict[str, TaskPlay] = {}
        self._lock = threading.Lock()
        """Protects the plays. Worlds are built and tools are called outside."""

    def begin(self, owner: str, choice: TaskChoice) -> PlayState:
        """Begins a play. Raises UnknownName, PlatformError, PlayLimit."""
        key = choice.task.strip() or draw_task_key(choice.app, choice.template or None, choice.number)
        task, now = make_task(key), self._clock()
        play = TaskPlay(
            secrets.token_hex(ID_BYTES), owner, task, Instance(task.seed, variables=task.variables), now, now
        )
        with self._lock:
            self._end_idle(owner)
            if len(self._plays) >= MAX_PLAYS:
                play.instance.close()
                raise PlayLimit(f"{MAX_PLAYS} tasks are being played here; one that is closed makes room")
            self._plays[play.id] = play
        return _state(play)

    def show(self, owner: str, play_id: str) -> PlayState:
        return _state(self._find(owner, play_id))

    def list(self, owner: str) -> list[PlaySummary]:
        with self._lock:
            own = [play for play in self._plays.values() if play.owner == owner]
        own.sort(key=lambda play: play.used_at, reverse=True)
        return [
            PlaySummary(one.id, str(one.task.key), one.task.prompt, len(one.calls), one.begun_at, one.used_at)
            for one in own
        ]

    def call(self, owner: str, play_id: str, tool: str, arguments: object) -> PlayState:
        """Calls a tool; a mistake of the caller is a result, too, as it is for a model."""
        play = self._find(owner, play_id)
        with play.lock:
            if len(play.calls) >= MAX_CALLS or play.kept >= MAX_KEPT:
                raise PlayLimit("this play has had all the calls that are kept of one; begin the task again")
            result = play.instance.call(tool, arguments)
            play.calls.append(PlayCall(tool, arguments, result.text, result.is_error))
            play.kept += len(str(arguments)) + len(result.text)
        return _state(play)

    def give_answer(self, owner: str, play_id: str, answer: str) -> PlayState:
        play = self._find(owner, play_id)
        play.answer = answer[:MAX_KEPT]
        return _state(play)

    def close(self, owner: str, play_id: str) -> None:
        play = self._find(owner, play_id)
        with self._lock:
            self._plays.pop(play.id, None)
        play.instance.close()

    def _find(self, owner: str, play_id: str) -> TaskPlay:
        with self._lock:
            play = self._plays.get(play_id)
            if play is None or play.owner != owner:
                raise NoSuchPlay(
                    f"there is no play {safe_text(play_id[:100])!r}; it may have ended: begin the task again"
                )
            play.used_at = self._clock()
        return play

    def _end_idle(self, owner: str) -> None:
        """Ends idle plays, and makes room for one more of this owner."""
        last_used = sorted(self._plays.values(), key=lambda play: play.used_at)
        own = [play for play in last_used if play.owner == owner]
        idle = [play for play in last_used if play.used_at < self._clock() - IDLE_S]
        for play in {one.id: one for one in (*idle, *own[: max(0, len(own) - MAX_OWN + 1)])}.values():
            del self._plays[play.id]
            play.instance.close()


def list_apps() -> list[ListedApp]:
    return [_listed(app) for app in APPS.values()]


def _listed(app: TaskApp) -> ListedApp:
    templates = [
        ListedTemplate(one.name, one.difficulty, one.max_turns, one.prompts[0])
        for one in sorted(app.templates, key=lambda one: one.difficulty)
    ]
    return ListedApp(app.key, app.title, app.description, len(app.tools), templates)


def _state(play: TaskPlay) -> PlayState:
    task = play.task
    answers = [PlayTool(SUBMIT.name, SUBMIT.description, SUBMIT.parameters, False)] if task.template.answer else []
    tools = [PlayTool(one.name, one.description, one.parameters, one.writes) for one in task.app.tools]
    try:
        changes, verdict = play.instance.changes(), verify(task, play.instance, play.answer)
        user = play.instance.hidden_facts()
    except PlatformError:  # it was closed meanwhile
        raise NoSuchPlay("this play has ended; begin the task again") from None
    return PlayState(
        id=play.id,
        task=str(task.key),
        app=task.app.key,
        prompt=task.prompt,
        variables={name: value for name, value in task.variables.items() if name[0] != "_"},
        max_turns=task.template.max_turns,
        asks_for_answer=task.template.answer is not None,
        tools=[*tools, *answers],
        calls=list(play.calls),
        answer=play.answer,
        changes=changes,
        user=user,
        verdict=verdict,
    )
