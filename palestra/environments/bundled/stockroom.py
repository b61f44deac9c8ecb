"""Stockroom: questions that cannot be answered without calling a tool first."""

from __future__ import annotations

import re
from typing import Any

from palestra.chat.tool_calls import ParsedCall, ParseFailure, parse_tool_call, without_thinking
from palestra.environments.bundled.seeded_random import last_integer
from palestra.environments.bundled.stockroom_tasks import (
    DONE,
    NO_CALL,
    Kind,
    answer,
    solve,
    tasks,
    tool_error,
    tool_result,
)
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput
from palestra.environments.tools import ToolGroup, tool
from palestra.util.json_types import JsonObject, JsonPayload

CALLS = re.compile(r"<(tool_call|function_call)>.*?(?:</\1>|\Z)", re.DOTALL)
MAX_INTEGER = 10**18
SHOWN_CHARS = 40  # of a name that the policy invented


class ToolRefusal(Exception):
    """The text that the policy gets instead of a result."""


class StockroomTools(ToolGroup):
    def __init__(self, stock: dict[str, int]) -> None:
        super().__init__("stockroom")
        self._stock = stock

    @tool
    def count(self, item: Any) -> int:
        if not isinstance(item, str) or item not in self._stock:
            raise ToolRefusal(f"unknown item {_shown(item)}")
        return self._stock[item]

    @tool
    def add(self, a: Any, b: Any) -> int:
        return _integer("a", a) + _integer("b", b)

    @tool
    def subtract(self, a: Any, b: Any) -> int:
        return _integer("a", a) - _integer("b", b)


PARAMETERS = {"count": ("item",), "add": ("a", "b"), "subtract": ("a", "b")}


class Stockroom(BaseTextEnv):
    """Up to six turns: a tool call in each, then the answer and `<done>`.

    The reward, 1 or 0, comes at the end, however the episode ends.
    """

    max_turns = 6
    tasks = staticmethod(tasks)
    gold = staticmethod(solve)
    reward_range = (0.0, 1.0)

    def __init__(self, env_config: Any = None, extras: JsonObject | None = None) -> None:
        super().__init__(env_config, extras)
        try:
            stock = {str(item): int(count) for item, count in self.extras["stock"].items()}
            self._answer = answer(Kind(self.extras["kind"]), self.extras["items"], stock)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"stockroom: a task needs 'kind', 'items' and 'stock' that fit ({error!r})") from error
        self.init_tool_groups([StockroomTools(stock)])
        self._tool_calls = 0
        self._tool_errors = 0
        self._parse_errors = 0
        self._is_over = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self._is_over:
            raise RuntimeError("stockroom: the episode is over")
        self.turns += 1
        reply, calls, before = without_thinking(action), self._tool_calls, self._parse_errors
        is_done = DONE in reply
        observation = self._run_tool(reply, is_done)
        self._is_over = is_done or self.turns >= self.max_turns
        metadata = {
            "turn": self.turns,
            "observation": observation,
            "tool_calls": self._tool_calls - calls,
            "parse_failed": self._parse_errors > before,
        }
        if not self._is_over:
            message = {"role": "user", "content": observation}
            return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata=metadata)
        metadata["done_reason"] = "agent_done" if is_done else "max_turns"
        return BaseTextEnvStepOutput(observations=[], reward=self._verify(reply), done=True, metadata=metadata)

    def get_metrics(self) -> JsonPayload:
        return {
            "turns": self.turns,
            "tool_calls": self._tool_calls,
            "tool_errors": self._tool_errors,
            "parse_error": float(self._parse_errors > 0),
        }

    def _run_tool(self, reply: str, is_done: bool) -> str:
        """Returns what the policy reads. A message that only ends the episode needs no call."""
        call = parse_tool_call(reply)
        if isinstance(call, ParsedCall):
            self._tool_calls += 1
            try:
                return tool_result(self._execute(call))
            except ToolRefusal as refusal:
                self._tool_errors += 1
                return tool_error(str(refusal))
        if isinstance(call, ParseFailure) or not is_done:
            self._parse_errors += 1
        return tool_error(call.reason if isinstance(call, ParseFailure) else NO_CALL)

    def _execute(self, call: ParsedCall) -> int:
        parameters = PARAMETERS.get(call.name)
        if parameters is None:
            raise ToolRefusal(f"unknown tool {_shown(call.name)}")
        if call.arguments.keys() != set(parameters):
            raise ToolRefusal(f"{call.name} takes {' and '.join(parameters)}")
        return self._execute_tool("stockroom", call.name, [call.arguments[name] for name in parameters])

    def _verify(self, reply: str) -> float:
        """Grades the answer, which is what was said last, not the arguments of a call."""
        number = last_integer(CALLS.sub(" ", reply.partition(DONE)[0]))
        if number is None:
            self._parse_errors += 1
        return 1.0 if number == self._answer else 0.0


def _integer(name: str, value: Any) -> int:
    """Converts a value; text is accepted, because small models write "37"."""
    if isinstance(value, str) and len(value) <= len(str(MAX_INTEGER)):
        try:
            value = int(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, int):
        raise ToolRefusal(f"{name} must be an integer")
    if abs(value) > MAX_INTEGER:
        raise ToolRefusal(f"{name} is too large")
    return value


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…")
