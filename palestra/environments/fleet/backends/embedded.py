"""The local platform in this process: an instance is a small database in memory, a call needs no socket."""

from __future__ import annotations

import json
from weakref import WeakSet

import msgspec

from palestra.environments.fleet.backend import MAX_CHANGES, FleetAttempt, FleetGrade, ToolAnswer
from palestra.environments.fleet.errors import BackendError
from palestra.environments.fleet.platform_tasks import platform_task
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.fleet.user_model import UserModel, rephrased, user_model_of
from palestra.environments.platform import Instance, PlatformError, PlatformTask, TaskVerdict, app_of, verify
from palestra.environments.platform.scripted_user import TALK
from palestra.environments.platform.seeds import seed_named
from palestra.environments.platform.verifiers import VerifierLimits, run_verifier
from palestra.environments.platform.verifiers.source import verifier_source
from palestra.types.openai import ChatTool
from palestra.util.json_types import JsonPayload

_live: WeakSet[EmbeddedBackend] = WeakSet()


def live_instances() -> int:
    """Returns the number of open instances of this process: 0 when all episodes are closed."""
    return len(_live)


class EmbeddedBackend:
    def __init__(self, task: FleetTask, settings: FleetSettings) -> None:
        self._task, self._settings = task, settings
        self._user = user_model_of(settings.user) if settings.user else None
        self._instance: Instance | None = None
        self._own: PlatformTask | None = None
        """Set if the task is one of the platform's, which then judges it itself."""

    async def create(self, data: bytes | None = None) -> None:
        """`data`: the database of another instance of the same task, of which this one is a copy."""
        task = self._task
        try:
            app = app_of(task.env_key)
            self._own = self._own_task()
            if task.env_version not in (None, app.version):
                raise PlatformError(f"{app.key} has version {app.version} here, not {task.env_version}")
            seed = self._own.seed if self._own else seed_named(app, task.data_key or "small-0")
        except PlatformError as e:
            raise BackendError(str(e)) from None
        variables = {str(key): str(value) for key, value in task.env_variables.items()}
        self._instance = Instance(seed, data, variables)
        _live.add(self)

    async def snapshot(self) -> bytes:
        return self._opened.snapshot()

    async def list_tools(self) -> list[ChatTool]:
        return self._opened.app.openai_tools()

    async def call_tool(self, name: str, arguments: JsonPayload) -> ToolAnswer:
        result = self._opened.call(name, arguments)
        answer = ToolAnswer(None, result.text) if result.is_error else ToolAnswer(json.loads(result.text))
        if name == TALK and self._user is not None and not answer.error:
            answer = await self._spoken(self._user, answer)
        return msgspec.structs.replace(answer, progress=self._progress())

    async def _spoken(self, user: UserModel, answer: ToolAnswer) -> ToolAnswer:
        """Puts what the script says into a model's words."""
        text = await rephrased(user, self._opened.hidden_facts(), answer.result["user"])
        with self._opened.transaction() as connection:
            connection.execute("UPDATE _talk SET text = ? WHERE id = (SELECT max(id) FROM _talk)", (text,))
        return msgspec.structs.replace(answer, result={**answer.result, "user": text})

    def _progress(self) -> float | None:
        """Returns the share of sub-goals that are met, for rewards of turns."""
        is_wanted = self._settings.partial_reward or self._settings.turn_rewards
        if self._own is None or self._own.template.goals is None or not is_wanted:
            return None
        return verify(self._own, self._opened).progress

    async def verify(self, attempt: FleetAttempt) -> FleetGrade:
        if self._own is not None:
            verdict = verify(self._own, self._opened, attempt.answer)
            partial = _partial(self._own, verdict) if self._settings.partial_reward and verdict.failed else 0.0
            return FleetGrade(
                score=verdict.score,
                partial=partial,
                stdout="\n".join(verdict.failed),
                met=verdict.met,
                missed=verdict.missed,
                changes=msgspec.to_builtins(self._opened.changes()[:MAX_CHANGES]),
                user=self._opened.hidden_facts(),
            )
        if not self._task.verifier_code:
            return FleetGrade(score=None, error=f"task {self._task.task_key} has no verifier")
        done = await run_verifier(
            self._task.verifier_code,
            self._opened.seed.data,
            self._opened.snapshot(),
            attempt.answer,
            attempt.conversation,
            VerifierLimits(self._settings.verifier_timeout_s, self._settings.verifier_memory_mib * 1024 * 1024),
        )
        return FleetGrade.of(done)

    async def close(self) -> None:
        if self._instance is not None:
            self._instance.close()
        _live.discard(self)

    @property
    def _opened(self) -> Instance:
        if self._instance is None:
            raise BackendError("there is no instance yet; create it first")
        return self._instance

    def _own_task(self) -> PlatformTask | None:
        """Returns the platform's task if key, prompt and verifier are the platform's own; with another verifier it is a
        task of another platform."""
        try:
            own = platform_task(self._task.task_key)
        except PlatformError:
            return None
        given = self._task
        is_ours = (own.app.key, own.prompt) == (given.env_key, given.prompt)
        is_ours &= given.data_key in (None, own.seed.key)
        is_ours &= given.verifier_code is None or given.verifier_code == verifier_source(own)
        return own if is_ours else None


def _partial(task: PlatformTask, verdict: TaskVerdict) -> float:
    """Returns the share of passed checks, without those that would pass by doing nothing; of a task with sub-goals, its
    progress."""
    if verdict.progress is not None:
        return min(verdict.progress, 1 - 1 / (2 * verdict.checks))  # all met, but not as a whole
    idle = Instance(task.seed, variables=task.variables)
    try:
        earned = set(verdict.met) - set(verify(task, idle).met)
    finally:
        idle.close()
    return len(earned) / verdict.checks
