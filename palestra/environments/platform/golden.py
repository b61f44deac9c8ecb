"""Gold trajectories: a task's own solution, played. They are used for imitation, and show that a task can be solved."""

from __future__ import annotations

import msgspec

from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.failing_tools import is_passing
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.task_records import PlatformTask
from palestra.environments.platform.task_templates import Solution, SolutionCall
from palestra.environments.platform.tool_schemas import ArgumentsSchema
from palestra.net.mcp import ToolResult
from palestra.util.json_types import JsonObject

ANSWER_TOOL = "submit_final_answer"


class AnswerTool(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: ArgumentsSchema


SUBMIT = AnswerTool(
    ANSWER_TOOL,
    "Give the final answer. This ends the task.",
    {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
)


class GoldTrajectory(msgspec.Struct, frozen=True):
    steps: list[tuple[SolutionCall, ToolResult]]
    answer: str | None = None


def play_golden(task: PlatformTask, instance: Instance) -> GoldTrajectory:
    """Plays a task's own solution. Raises PlatformError where it does not work."""
    try:
        return play_solution(task.template.solve(task.params), instance)
    except PlatformError as e:
        raise PlatformError(f"the solution of {task.key} does not work: {e}") from None


def play_solution(solving: Solution, instance: Instance) -> GoldTrajectory:
    """Plays calls; one that fails for the moment is made again. Raises PlatformError."""
    steps: list[tuple[SolutionCall, ToolResult]] = []
    answer: JsonObject | None = None
    while True:
        try:
            call = next(solving) if answer is None else solving.send(answer)
        except StopIteration:
            return GoldTrajectory(steps)
        if call.tool == ANSWER_TOOL:
            return GoldTrajectory(steps, call.arguments["answer"])
        result = instance.call(call.tool, call.arguments)
        if result.is_error and is_passing(result):
            steps.append((call, result))
            result = instance.call(call.tool, call.arguments)
        if result.is_error:
            raise PlatformError(f"{call} returns {result.text}")
        steps.append((call, result))
        answer = msgspec.json.decode(result.text)
