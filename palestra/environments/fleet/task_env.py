"""One rollout of a Fleet task at the level of calls: dicts in, dicts out, no text grammar.

It has the interface of the OpenEnv layer that Fleet's own integration uses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import msgspec

from palestra.environments.fleet.backend import BackendFactory, CopyableBackend, FleetAttempt, FleetBackend, FleetGrade
from palestra.environments.fleet.backends import make_backend
from palestra.environments.fleet.errors import BackendError
from palestra.environments.fleet.event_loop import run_sync
from palestra.environments.fleet.prompts import error_of
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.fleet.tool_schemas import SUBMIT, name_of
from palestra.environments.guarded_calls import error_text
from palestra.environments.platform.golden import ANSWER_TOOL
from palestra.types.openai import ChatTool
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject

log = logging.getLogger(__name__)


class TaskObservation(TypedDict):
    """What a rollout sees at its beginning and after a step."""

    prompt: str
    observation: object
    """The result of the call."""
    step: int
    task_key: str
    modality: str
    tools: list[ChatTool]


class StepFacts(TypedDict, total=False):
    """What a step tells beside its observation."""

    step: int
    done_reason: str | None
    reward_computed: bool
    progress: float
    """The share of the task's sub-goals that is met."""
    submitted_answer: str
    tool_error: str
    tool_result: Any


TaskStep: TypeAlias = tuple[TaskObservation, float | None, bool, StepFacts]
"""Observation, reward, whether the episode is over, and facts."""


class TaskState(msgspec.Struct, frozen=True):
    """A rollout between two steps."""

    instance: bytes
    steps: int
    answer: str | None
    tool_errors: list[str]
    tool_time_s: float


_closing: set[asyncio.Task[None]] = set()
"""Tasks that close instances continue if their caller is cancelled."""


async def _created(backend: FleetBackend, data: bytes | None) -> None:
    if data is None:
        await backend.create()
    elif isinstance(backend, CopyableBackend):
        await backend.create(data)
    else:
        raise BackendError(f"{type(backend).__name__} makes no copies of instances")


class OpenEnvTask:
    """Call `reset_async`, then `step_async` until done, then `close_async`, which may be called at any time, and
    repeatedly."""

    def __init__(
        self,
        task_config: FleetTask | JsonMapping,
        settings: FleetSettings | None = None,
        max_steps: int = 50,
        factory: BackendFactory = make_backend,
    ) -> None:
        self.task = task_config if isinstance(task_config, FleetTask) else FleetTask.of(task_config)
        self.settings = settings or FleetSettings()
        self.max_steps = max_steps
        self.final_reward: float | None = None
        self.verifier_stdout = self.verifier_error = ""
        self.tool_errors_list: list[str] = []
        self.conversation: Sequence[Message] = ()
        """For verifiers that read it; the owner of the conversation stores it here."""
        self.tool_time_s = 0.0
        self._factory = factory
        self._backend: FleetBackend | None = None
        self._creation: asyncio.Task[None] | None = None
        self._tools: list[ChatTool] = []
        self._steps = 0
        self._answer: str | None = None
        self._progress: float | None = None
        self._rewarded = 0.0
        """Sum of the turns' rewards so far."""
        self._is_done = False
        self._grade: FleetGrade | None = None
        self._close: asyncio.Task[None] | None = None

    @property
    def is_graded(self) -> bool:
        return self._grade is not None

    @property
    def verdict(self) -> JsonObject:
        """Returns what the verifier saw and said, for people to read; empty before the grade."""
        if self._grade is None:
            return {}
        verdict = {name: value for name, value in msgspec.to_builtins(self._grade).items() if value or name == "score"}
        return {**verdict, **({} if self._answer is None else {"answer": self._answer})}

    async def reset_async(self, seed: int | None = None) -> TaskObservation:
        """Makes a new instance. `seed` exists for compatibility: the task says which data it has. Raises
        BackendError."""
        return await self._begun()

    async def snapshot_async(self) -> TaskState:
        """Copies the rollout and its instance. Raises BackendError if instances of this kind cannot be copied."""
        if not isinstance(self._backend, CopyableBackend):
            raise BackendError(f"instances of {type(self._backend).__name__} cannot be copied")
        errors = list(self.tool_errors_list)
        return TaskState(await self._backend.snapshot(), self._steps, self._answer, errors, self.tool_time_s)

    async def restore_async(self, state: TaskState) -> TaskObservation:
        """Begins as a copy of a rollout, in place of `reset_async`. Raises BackendError."""
        observation = await self._begun(state.instance)
        self._steps, self._answer = state.steps, state.answer
        self.tool_errors_list, self.tool_time_s = list(state.tool_errors), state.tool_time_s
        return {**observation, "step": self._steps}

    async def _begun(self, data: bytes | None = None) -> TaskObservation:
        await self.close_async(grade=False)
        self._close, self._backend = None, self._factory(self.task, self.settings)
        self._steps, self._answer, self._is_done, self._grade, self.final_reward = 0, None, False, None, None
        self.tool_errors_list, self.tool_time_s = [], 0.0
        self._progress, self._rewarded = None, 0.0
        # In a task of its own: an instance that is made after we were cancelled can still be closed.
        self._creation = asyncio.create_task(_created(self._backend, data), name="fleet-create")
        await asyncio.shield(self._creation)
        self._tools = await self._backend.list_tools()
        if self.task.is_answered and ANSWER_TOOL not in map(name_of, self._tools):
            self._tools = [*self._tools, SUBMIT]
        return self._observation({})

    async def step_async(self, action: JsonMapping) -> TaskStep:
        """Takes `{"tool", "params", "done"}`: makes the call, if there is one, then ends, if it says so. A reward of
        None is unknown."""
        if self._backend is None or self._creation is None:
            raise RuntimeError("step was called before reset; await reset_async() first")
        if self._is_done:
            raise RuntimeError("step was called after the end; await reset_async() for another episode")
        self._steps += 1
        info: StepFacts = {"step": self._steps, "done_reason": None}
        result = await self._called(action, info) if action.get("tool") is not None else None
        is_ended = bool(action.get("done")) or "submitted_answer" in info
        if self._progress is not None:
            info["progress"] = self._progress
        reward: float | None
        if is_ended or self._steps >= self.max_steps:
            info |= {"done_reason": "agent_done" if is_ended else "max_steps", "reward_computed": True}
            reward = await self.grade_rest_async()
        else:
            reward = self._turn_reward()
        return self._observation({} if result is None else result), reward, self._is_done, info

    async def grade_async(self) -> float | None:
        """Ends the rollout: the verifier runs once, and its result is returned again by later calls."""
        if self._backend is None:
            raise RuntimeError("there is nothing to grade; await reset_async() first")
        self._is_done = True
        if self._grade is None:
            self._grade = await self._verified(self._backend)
            grade, is_partial = self._grade, self.settings.partial_reward
            self.verifier_stdout, self.verifier_error = grade.stdout, grade.error
            self.final_reward = grade.partial if is_partial and grade.score == 0.0 else grade.score
        return self.final_reward

    async def grade_rest_async(self) -> float | None:
        """Ends the rollout and returns its reward, less what its turns have got."""
        graded = await self.grade_async()
        return None if graded is None else graded - self._rewarded

    def _turn_reward(self) -> float:
        """Returns what the last call has brought nearer, where turns have rewards."""
        if not self.settings.turn_rewards or self._progress is None:
            return 0.0
        reward = self._progress - self._rewarded
        self._rewarded = self._progress
        return reward

    async def close_async(self, *, grade: bool = True) -> None:
        """Closes the instance; it is gone when this returns. With `grade`, a rollout that was begun and not graded is
        graded first. If it is cancelled, closing continues without its caller."""
        if self._close is None:
            self._close = asyncio.create_task(self._closed(grade), name="fleet-close")
            _closing.add(self._close)
            self._close.add_done_callback(_closing.discard)
        await asyncio.shield(self._close)

    def reset(self, seed: int | None = None) -> TaskObservation:
        return run_sync(self.reset_async(seed))

    def step(self, action: JsonMapping) -> TaskStep:
        return run_sync(self.step_async(action))

    def close(self) -> None:
        run_sync(self.close_async())

    async def _called(self, action: JsonMapping, info: StepFacts) -> Any:
        name, arguments = action["tool"], action.get("params")
        if name == ANSWER_TOOL and SUBMIT in self._tools and isinstance(arguments, Mapping):
            answer = arguments.get("answer")
            self._answer = answer if isinstance(answer, str) else "" if answer is None else str(answer)
            info |= {"submitted_answer": self._answer}
            return None
        began_s = time.perf_counter()
        result, error = await self._tried(name, {} if arguments is None else arguments)
        self.tool_time_s += time.perf_counter() - began_s
        if error:
            info["tool_error"] = error
            self.tool_errors_list.append(error)
            return None
        info["tool_result"] = result
        return result

    async def _tried(self, name: object, arguments: object) -> tuple[Any, str]:
        """Returns the result, or the text that the model gets instead. A lost instance is not caused by the model, and
        raises."""
        assert self._backend is not None
        if not isinstance(name, str):
            return None, f"a tool's name must be text, not {name!r}"
        if not isinstance(arguments, dict):
            return None, f"the arguments of {name} must be an object"
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                answer = await self._backend.call_tool(name, arguments)
        except BackendError:
            raise
        except TimeoutError:
            return None, f"{name} did not answer within {self.settings.request_timeout_s:g} s"
        except Exception as e:  # boundary: an error of a tool is for the model to read
            return None, error_text(e)
        self._progress = answer.progress
        return answer.result, answer.error or error_of(answer.result) or ""

    async def _verified(self, backend: FleetBackend) -> FleetGrade:
        """Returns the grade; an error while grading leaves it unknown."""
        try:
            return await backend.verify(FleetAttempt(answer=self._answer, conversation=self.conversation))
        except Exception as e:  # boundary: a verifier that fails is no verdict
            log.warning("task %s could not be graded: %s", self.task.task_key, error_text(e))
            return FleetGrade(score=None, error=error_text(e))

    async def _closed(self, grade: bool) -> None:
        backend, self._backend = self._backend, None
        if backend is None:
            return
        try:
            if self._creation is not None:
                await asyncio.gather(self._creation, return_exceptions=True)
                if grade and self._grade is None and self._creation.exception() is None:
                    self._backend = backend
                    await self.grade_async()
        finally:
            self._backend, self._is_done = None, True
            await backend.close()

    def _observation(self, observation: object) -> TaskObservation:
        return {
            "prompt": self.task.prompt,
            "observation": observation,
            "step": self._steps,
            "task_key": self.task.task_key,
            "modality": self.task.task_modality,
            "tools": self._tools,
        }
