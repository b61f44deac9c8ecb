"""`fleet_task`: a Fleet task as a text environment.

The interface is that of the FleetTaskEnv which SkyRL's training knows.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from palestra.chat.tool_calls import without_thinking
from palestra.environments.fleet import context_tools, prompts
from palestra.environments.fleet.actions import AgentAction, CallRequest, parse_action
from palestra.environments.fleet.backends import kind_of
from palestra.environments.fleet.context_tools import ContextState, ContextTools
from palestra.environments.fleet.event_loop import run_sync
from palestra.environments.fleet.metrics import aggregate_metrics
from palestra.environments.fleet.platform_tasks import PLATFORM, PlatformTasks, Split, gold_messages
from palestra.environments.fleet.prompts import PromptStyle, system_prompt
from palestra.environments.fleet.settings import FLEET, FleetSettings
from palestra.environments.fleet.splits import rows_of, split_tasks
from palestra.environments.fleet.task_env import OpenEnvTask, TaskState
from palestra.environments.fleet.task_files import find_task, load_tasks
from palestra.environments.fleet.tool_schemas import name_of
from palestra.environments.fleet.user_model import user_model_of
from palestra.environments.guarded_calls import error_text
from palestra.environments.pictures import pictures_in, without_pictures
from palestra.environments.platform.scripted_user import TALK
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput, ConversationType, MessageType
from palestra.types.openai import ChatTool
from palestra.types.rollouts import Task
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

API_KEY = "FLEET_API_KEY"
DEFAULT_TASKS = "platform:keys"
MAX_TURNS, MAX_OUTPUT_CHARS = 50, 10_000


class TurnOutcome(msgspec.Struct, kw_only=True):
    """The outcome of one turn, before it becomes text."""

    result: Any = None
    error: str | None = None
    reward: float | None = 0.0
    is_ended: bool = False
    """Whether the model ended it: it said so, or gave its answer."""
    was_called: bool = False
    is_context_tools: bool = False
    """Whether it is the answer of a context tool, which is short and must not be cut again."""
    is_history_changed: bool = False
    progress: float | None = None


class EpisodeState(msgspec.Struct, frozen=True, kw_only=True):
    """An episode between two turns."""

    task: TaskState
    history: ConversationType
    turns: int
    tool_calls: int
    tool_errors: int
    parse_errors: int
    context: ContextState | None


class FleetTaskEnv(BaseTextEnv):
    """A task in an app, solved by calling its tools; the changes in the app decide about the reward."""

    reward_range = (0.0, 1.0)

    def __init__(self, env_config: Any, extras: Mapping[str, Any] = {}) -> None:
        super().__init__(env_config, {key: value for key, value in extras.items() if key != "max_turns"})
        if not extras.get("task_key"):
            raise ValueError("extras has no task_key, which names the task")
        tasks_file = (env_config.get("tasks_file") if env_config else None) or extras.get("tasks_file")
        if not tasks_file:
            raise ValueError("tasks_file is missing; give it in env_config or in extras")
        self.task = find_task(str(tasks_file), str(extras["task_key"]))
        self.settings = self._with_key(FleetSettings.of(env_config))
        if self.settings.user:
            user_model_of(self.settings.user)
        self.task_key = self.task.task_key
        self.max_turns = int(extras.get("max_turns") or self.task.max_turns or MAX_TURNS)
        self.max_output_chars = int(extras.get("max_output_chars") or MAX_OUTPUT_CHARS)
        self.chat_history: ConversationType = []
        self.turns = self.tool_calls = self.tool_errors = self.parse_errors = 0
        self.tools: list[ChatTool] = []
        self.openenv_task_env: OpenEnvTask | None = None
        self._context: ContextTools | None = None
        self._is_over = False
        self._is_unknown = False

    def _with_key(self, settings: FleetSettings) -> FleetSettings:
        key = settings.api_key or os.environ.get(API_KEY)
        if kind_of(self.task, settings) == FLEET and not key:
            raise ValueError(f"hosted Fleet needs an API key: env_config.api_key or {API_KEY}")
        return msgspec.structs.replace(settings, api_key=key)

    # Episodes

    async def init_async(self, prompt: ConversationType | None = None) -> tuple[ConversationType, JsonObject]:
        """`prompt` is ignored: the task has its own. Raises RuntimeError if there is no instance."""
        await self._open(None)
        self._begin()
        facts = {"task_key": self.task_key, "env_key": self.task.env_key, "tools": self.tools}
        return copy.deepcopy(self.chat_history), {**facts, "modality": self.task.task_modality}

    async def snapshot_async(self) -> bytes:
        """Returns the episode with its instance, where instances can be copied: those of the platform in this
        process. Raises BackendError elsewhere."""
        if self.openenv_task_env is None:
            raise RuntimeError("there is nothing to copy; await init_async(prompt) first")
        counts = {name: getattr(self, name) for name in ("turns", "tool_calls", "tool_errors", "parse_errors")}
        context = None if self._context is None else self._context.state
        task = await self.openenv_task_env.snapshot_async()
        return msgspec.msgpack.encode(EpisodeState(task=task, history=self.chat_history, context=context, **counts))

    async def restore_async(self, data: bytes) -> None:
        """Goes on from a snapshot of an episode of the same task, in place of `init_async`."""
        state = msgspec.msgpack.decode(data, type=EpisodeState)
        await self._open(state.task)
        self._begin()
        self.chat_history[:] = state.history
        self.turns, self.tool_calls = state.turns, state.tool_calls
        self.tool_errors, self.parse_errors = state.tool_errors, state.parse_errors
        if self._context is not None and state.context is not None:
            self._context.restore(state.context)

    async def _open(self, state: TaskState | None) -> None:
        """Makes an instance, new or as it was in a state."""
        await self.close_async()
        self.openenv_task_env = below = OpenEnvTask(self.task, self.settings, self.max_turns)
        try:
            observation = await (below.reset_async() if state is None else below.restore_async(state))
        except Exception as e:  # boundary: SkyRL expects a RuntimeError, whatever it was
            await self.close_async()
            raise RuntimeError(f"Failed to create OpenEnv FleetTaskEnv: {error_text(e)}") from e
        except BaseException:  # when cancelled: the instance must not stay
            await self.close_async()
            raise
        self.tools = list(observation["tools"])
        if not self.tools:
            await self.close_async()
            raise RuntimeError(f"task {self.task_key}: {self.task.env_key} has no tools")
        if self.settings.enable_context_tools:
            self.tools += context_tools.SPECS

    def _begin(self) -> None:
        self.turns = self.tool_calls = self.tool_errors = self.parse_errors = 0
        self._is_over = self._is_unknown = False
        self.chat_history = [
            {"role": "system", "content": system_prompt(self.task, self.tools, self.settings.prompt_style)},
            {"role": "user", "content": self.task.prompt},
        ]
        is_wanted = self.settings.enable_context_tools
        self._context = ContextTools(self.chat_history, self.max_output_chars) if is_wanted else None

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """Makes a step. After the end it only repeats that the episode is over."""
        if self._is_over:
            return _output([], 0.0, True, {"done_reason": "over", "task_key": self.task_key})
        if self.openenv_task_env is None:
            raise RuntimeError("step was called before init; await init_async(prompt) first")
        began_s, tools_s = time.perf_counter(), self.openenv_task_env.tool_time_s
        self.turns += 1
        self._say("assistant", action)
        is_last = self.turns >= self.max_turns
        read = self._said_to_user(parse_action(action, self.settings.grammar), action)
        calls, parse_errors = self.tool_calls, self.parse_errors
        outcome = await self._acted(read, is_last)
        self._count(read, outcome)
        if outcome.is_ended or is_last:
            self._is_over, self._is_unknown = True, outcome.reward is None
        if is_last:
            ended = {"done_reason": "max_turns", "task_key": self.task_key}
            return _output([], outcome.reward, True, {**ended, **self._hints()})
        text, pictures = self._observation_text(read, outcome), pictures_in(outcome.result)
        message = self._say("user", [{"type": "text", "text": text}, *pictures] if pictures else text)
        metadata = {
            "task_key": self.task_key,
            "turn": self.turns,
            "tool_calls": self.tool_calls - calls,
            "parse_failed": self.parse_errors > parse_errors,
            "tool_call": None if read.call is None else msgspec.to_builtins(read.call),
            "tool_result": outcome.result,
            "error": outcome.error,
            "done_reason": "agent_done" if outcome.is_ended else None,
            "step_time": time.perf_counter() - began_s,
            "mcp_time": self.openenv_task_env.tool_time_s - tools_s,
        }
        if outcome.progress is not None:
            metadata["progress"] = outcome.progress
        if outcome.is_history_changed:
            metadata["modified_chat_history"] = copy.deepcopy(self.chat_history)
        return _output([message], outcome.reward, outcome.is_ended, {**metadata, **self._hints()})

    async def grade_async(self) -> float | None:
        """Grades an episode that is ended from outside, e.g. for lack of context or time: runs the verifier once."""
        if self.openenv_task_env is None:
            raise RuntimeError("there is nothing to grade; await init_async(prompt) first")
        if self._is_over:
            return 0.0  # the last step already had the reward
        self._is_over = True
        self.openenv_task_env.conversation = self.chat_history
        reward = await self.openenv_task_env.grade_rest_async()
        self._is_unknown = reward is None
        return reward

    async def close_async(self) -> None:
        """Closes the instance; it is gone when this returns."""
        if self.openenv_task_env is not None:
            await self.openenv_task_env.close_async(grade=False)

    def init(self, prompt: ConversationType | None = None) -> tuple[ConversationType, JsonObject]:
        return run_sync(self.init_async(prompt))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return run_sync(self.step_async(action))

    def close(self) -> None:
        run_sync(self.close_async())

    # Metrics and tasks

    def get_metrics(self) -> JsonPayload:
        return {
            "task_key": self.task_key,
            "env_key": self.task.env_key,
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
            "parse_error": float(self.parse_errors > 0),
            "unknown_reward": float(self._is_unknown),
        }

    async def get_verdict_async(self) -> JsonObject:
        return {} if self.openenv_task_env is None else self.openenv_task_env.verdict

    @staticmethod
    def aggregate_metrics(metrics: list[JsonObject]) -> JsonPayload:
        return aggregate_metrics(metrics)

    @staticmethod
    def tasks(split: Split, env_config: JsonMapping | None = None) -> Sequence[Task]:
        """Returns the tasks of the tasks_file, for a training run without a file of rows."""
        tasks_file = str((env_config or {}).get("tasks_file") or DEFAULT_TASKS)
        if tasks_file.startswith(PLATFORM):
            return PlatformTasks.parse(tasks_file).tasks(split)
        return rows_of(split_tasks(load_tasks(tasks_file).values(), split), tasks_file)

    @staticmethod
    def gold(task: Task) -> list[str] | None:
        """Returns the messages of the platform's own solution; None for tasks of another platform."""
        is_ours = str(task.extras.get("tasks_file", "")).startswith(PLATFORM)
        return gold_messages(str(task.extras["task_key"])) if is_ours else None

    # One turn

    async def _acted(self, read: AgentAction, is_last: bool) -> TurnOutcome:
        assert self.openenv_task_env is not None
        self.openenv_task_env.conversation = self.chat_history
        outcome = TurnOutcome(is_ended=read.is_done)
        call = read.call
        if call is not None and self._context is not None and call.name in context_tools.NAMES:
            self._tend(call, self._context, outcome)
            call = None
        ends = read.is_done or is_last
        if call is None and not ends:
            return outcome
        requested = {"done": ends} if call is None else {"tool": call.name, "params": call.arguments, "done": ends}
        outcome.was_called |= call is not None
        _, outcome.reward, _, info = await self.openenv_task_env.step_async(requested)
        if call is not None:
            outcome.result, outcome.error = info.get("tool_result"), info.get("tool_error")
            outcome.is_ended |= "submitted_answer" in info
            outcome.progress = info.get("progress")
            self.tool_calls += 1
        return outcome

    def _said_to_user(self, read: AgentAction, action: str) -> AgentAction:
        """Returns a message without a call as something said to the user, where there is one."""
        is_plain = read.call is None and not read.is_done and not read.problem
        text = without_thinking(action).strip()
        if not is_plain or not text or TALK not in map(name_of, self.tools):
            return read
        return msgspec.structs.replace(read, call=CallRequest(TALK, {"message": text}))

    def _tend(self, call: CallRequest, tools: ContextTools, outcome: TurnOutcome) -> None:
        outcome.was_called = outcome.is_context_tools = True
        try:
            outcome.result, outcome.is_history_changed = tools.call(call.name, call.arguments)
        except ValueError as e:
            outcome.error = str(e)

    def _count(self, read: AgentAction, outcome: TurnOutcome) -> None:
        self.tool_errors += outcome.error is not None
        self.parse_errors += read.call is None and (bool(read.problem) or not read.is_done)

    def _observation_text(self, read: AgentAction, outcome: TurnOutcome) -> str:
        if outcome.error is not None:
            text = f"Error: {outcome.error}"
        elif outcome.was_called and (outcome.result is not None or not outcome.is_ended):
            if read.call is not None and read.call.name == TALK and isinstance(outcome.result, dict):
                return str(outcome.result["user"])
            indent = None if self.settings.prompt_style is PromptStyle.COMPACT else 2
            text = prompts.result_text(without_pictures(outcome.result), indent)
        elif outcome.is_ended:
            text = prompts.COMPLETE
        else:
            text = prompts.problem_text(read.problem)
        if read.ignored_calls:
            text += f"\nOnly the first of {read.ignored_calls + 1} tool calls was run."
        return text if self._context is None or outcome.is_context_tools else self._context.cut(text)

    def _say(self, role: str, content: str | list[JsonObject]) -> MessageType:
        message: MessageType = {"role": role, "content": content}
        self.chat_history.append(message)
        if self._context is not None:
            self._context.note([message])
        return dict(message)

    def _hints(self) -> JsonPayload:
        below = self.openenv_task_env
        if not (self.settings.hints and self._is_over and below is not None):
            return {}
        return {
            "verifier_stdout": below.verifier_stdout,
            "verifier_error": below.verifier_error,
            "tool_errors_list": list(below.tool_errors_list),
        }


def _output(
    messages: ConversationType, reward: float | None, done: bool, metadata: JsonPayload
) -> BaseTextEnvStepOutput:
    return BaseTextEnvStepOutput(observations=messages, reward=reward, done=done, metadata=metadata)
