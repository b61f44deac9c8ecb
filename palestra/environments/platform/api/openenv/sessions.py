"""Sessions: each has one instance of the pool, and the episode that is played on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass

from palestra.environments.platform.api.openenv import wire
from palestra.environments.platform.api.openenv.tasks import task_for
from palestra.environments.platform.api.openenv.wire import (
    Action,
    CallTool,
    ClientMistake,
    ErrorCode,
    FinishAction,
    Observation,
    OpenEnvState,
    ResetRequest,
)
from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.golden import ANSWER_TOOL, SUBMIT
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import InstanceGone, InstanceSpec
from palestra.environments.platform.seeds import DEFAULT_DATA, seed_named
from palestra.environments.platform.task_records import PlatformTask
from palestra.environments.platform.verdicts import TaskVerdict, verify
from palestra.net.mcp import ToolResult
from palestra.util.json_types import JsonPayload

log = logging.getLogger(__name__)

ID_BYTES = 16
FEW = 64  # fewer sessions are not worth searching


@dataclass(slots=True)
class OpenEnvSession:
    id: str
    team: str
    app: TaskApp
    pool: InstancePool
    instance_id: str
    episode_id: str | None = None
    task: PlatformTask | None = None
    """None before the first reset: then tools work on a world of their own, without a task."""
    steps: int = 0
    calls: int = 0
    """Number of tool calls in this episode: a task allows `max_turns` of them."""
    is_done: bool = False
    is_attached: bool = False
    """Whether a WebSocket plays here."""
    is_closing: bool = False
    """Whether it is to be closed when the WebSocket has ended."""

    async def reset(self, request: ResetRequest) -> Observation:
        task = await asyncio.to_thread(task_for, self.app, request)
        self.pool.replace(self.instance_id, task.seed.key, task.variables)
        self.task, self.steps, self.calls, self.is_done = task, 0, 0, False
        self.episode_id = request.episode_id or secrets.token_hex(ID_BYTES)
        return first_observation(task)

    def step(self, action: Action) -> Observation:
        match action:
            case CallTool(tool_name=name, arguments=arguments):
                if name == ANSWER_TOOL and self._is_answered:
                    return self._finish(arguments.get("answer"))
                if self._has_no_turn and not self.is_done:
                    return self._run_out(name)
                return wire.called(name, self.call(name, arguments))
            case FinishAction(answer=answer):
                return self._finish(answer)
            case _:
                extra = [SUBMIT] if self._is_answered else []
                return wire.observed({"tools": wire.tools_shown([*self.app.tools, *extra])}, {})

    def call(self, name: str, arguments: object) -> ToolResult:
        """Calls a tool. Raises ClientMistake if the episode is over, or the task allows no more calls."""
        self._check_running()
        if self._has_no_turn:
            raise ClientMistake(ErrorCode.EXECUTION, f"{self._turns_told}: finish")
        with self.pool.use(self.instance_id) as instance:
            self.steps, self.calls = self.steps + 1, self.calls + 1
            return instance.call(name, arguments)

    def state(self) -> OpenEnvState:
        key = None if self.task is None else str(self.task.key)
        return {"episode_id": self.episode_id, "step_count": self.steps, "task_key": key, "done": self.is_done}

    @property
    def _is_answered(self) -> bool:
        """Whether the task requires an answer: its prompt names the tool for it."""
        return self.task is not None and self.task.template.answer is not None

    @property
    def _has_no_turn(self) -> bool:
        return self.task is not None and self.calls >= self.task.template.max_turns

    @property
    def _turns_told(self) -> str:
        return f"the task allows {self.calls} tool calls, and all have been made"

    def _check_running(self) -> None:
        if self.is_done:
            raise ClientMistake(ErrorCode.EXECUTION, "the episode has ended; reset for another")

    def _finish(self, answer: object) -> Observation:
        """Ends the episode; the verifier runs once."""
        self._check_running()
        if self.task is None:
            raise ClientMistake(ErrorCode.EXECUTION, "there is no task to finish; reset first, on a WebSocket (/ws)")
        given = None if answer is None else str(answer)
        return self._judged(self.task, given, {"answer": given}, "finished")

    def _run_out(self, name: str) -> Observation:
        """Handles one call too many: it is not made, and the present state is graded, without an answer."""
        assert self.task is not None
        error = {"error_type": "execution_error", "message": f"{self._turns_told}: the episode is over"}
        return self._judged(self.task, None, {"tool_name": name, "result": None, "error": error}, "max_turns")

    def _judged(self, task: PlatformTask, answer: str | None, fields: JsonPayload, reason: str) -> Observation:
        with self.pool.use(self.instance_id) as instance:
            self.steps, self.is_done = self.steps + 1, True
            verdict = _verdict(task, instance, answer)
        body = {"task_key": str(task.key), "is_verdict_known": not verdict.is_unknown, "done_reason": reason}
        return wire.observed(fields, body, verdict.score, done=True)


class OpenEnvSessions:
    def __init__(self, pool: InstancePool) -> None:
        self.pool = pool
        self._open: dict[str, OpenEnvSession] = {}
        self._look_at = FEW

    async def open(self, app: TaskApp, team: str) -> OpenEnvSession:
        """Opens a session. Raises LimitReached."""
        spec = InstanceSpec(app=app.key, data=DEFAULT_DATA, version=app.version)
        record = await asyncio.to_thread(self.pool.create, team, spec)
        session = OpenEnvSession(secrets.token_hex(ID_BYTES), team, app, self.pool, record.id)
        self._open[session.id] = session
        self._forget_ended()
        return session

    def find(self, session_id: object, app: TaskApp, team: str) -> OpenEnvSession | None:
        """Returns a session; None also if its instance has ended."""
        found = self._open.get(session_id) if isinstance(session_id, str) else None
        if found is None or (found.app.key, found.team) != (app.key, team):
            return None
        if self._is_over(found):
            del self._open[found.id]
            return None
        return found

    def close(self, session: OpenEnvSession) -> None:
        self._open.pop(session.id, None)
        with contextlib.suppress(InstanceGone):
            self.pool.close(session.instance_id, session.team)

    def close_all(self) -> None:
        for session in list(self._open.values()):
            self.close(session)

    def __len__(self) -> int:
        return len(self._open)

    def _forget_ended(self) -> None:
        """Forgets sessions that were not closed and whose instances have expired. Runs whenever there are twice as many
        as last time."""
        if len(self._open) >= self._look_at:
            self._open = {one.id: one for one in self._open.values() if not self._is_over(one)}
            self._look_at = max(FEW, 2 * len(self._open))

    def _is_over(self, session: OpenEnvSession) -> bool:
        try:
            return self.pool.record(session.instance_id).is_over
        except InstanceGone:
            return True


def first_observation(task: PlatformTask) -> Observation:
    about = {
        "task_key": str(task.key),
        "split": task.key.split,
        "difficulty": task.key.difficulty,
        "max_turns": task.template.max_turns,
    }
    return wire.observed({"prompt": task.prompt, "variables": dict(task.variables)}, about)


def call_once(app: TaskApp, name: str, arguments: object) -> ToolResult:
    """Calls a tool in a world that is deleted afterwards."""
    instance = Instance(seed_named(app, DEFAULT_DATA))
    try:
        return instance.call(name, arguments)
    finally:
        instance.close()


def _verdict(task: PlatformTask, instance: Instance, answer: str | None) -> TaskVerdict:
    try:
        return verify(task, instance, answer)
    except Exception:  # boundary: a verifier that fails is no verdict
        log.exception("the verifier of %s failed unexpectedly", task.key)
        return TaskVerdict(score=None)
