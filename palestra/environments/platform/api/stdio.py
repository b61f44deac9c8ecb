"""MCP over standard input and output: one instance for the agent that started this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import BinaryIO

import msgspec

from palestra.environments.platform.api.mcp import mcp_answer
from palestra.environments.platform.catalog import APPS, app_of
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.golden import ANSWER_TOOL, SUBMIT
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.seeds import DEFAULT_DATA, seed_named
from palestra.environments.platform.task_records import PlatformTask
from palestra.environments.platform.tasks import make_task
from palestra.environments.platform.verdicts import TaskVerdict, verify
from palestra.net.mcp import ListedTool, ToolResult

OVER = {"error": "task_over", "message": "the task is over: its answer was given", "hint": "say that you are done"}
NO_ANSWER = {"error": "bad_arguments", "message": "answer: a text is needed", "hint": f"{ANSWER_TOOL}(answer: string)"}


class StdioWorld:
    """The tools of an instance and, if the task requires an answer, the tool for it: MCP's `Toolset`."""

    def __init__(self, instance: Instance, task: PlatformTask | None, report: Callable[[TaskVerdict], None]) -> None:
        self.instance, self.task = instance, task
        self.key, self.title = instance.app.key, instance.app.title
        self._report = report
        self._is_answered = task is not None and task.template.answer is not None
        self._is_over = False

    @property
    def version(self) -> str:
        return f"{self.instance.app.version}{'.answered' if self._is_answered else ''}"

    @property
    def tools(self) -> Sequence[ListedTool]:
        tools = self.instance.app.tools
        return [*tools, SUBMIT] if self._is_answered else tools

    @property
    def instructions(self) -> str:
        day, name = (self.instance.variables[one] for one in ("CURRENT_DATE", "LOGGED_IN_NAME"))
        about = f"{self.instance.app.instructions} In this world today is {day}, and you are {name}."
        return about if self.task is None else f"{about}\n\nThe task: {self.task.prompt}"

    def call(self, name: str, arguments: object) -> ToolResult:
        if self._is_over:
            return _refused(OVER)
        if name != ANSWER_TOOL or not self._is_answered:
            return self.instance.call(name, arguments)
        answer = arguments.get("answer") if isinstance(arguments, dict) else None
        if not isinstance(answer, str):
            return _refused(NO_ANSWER)
        self.finish(answer)
        return ToolResult(msgspec.json.encode({"submitted": answer}).decode())

    def finish(self, answer: str | None = None) -> None:
        """Ends a task, if there is one: the verifier runs once."""
        if self.task is not None and not self._is_over:
            self._is_over = True
            self._report(verify(self.task, self.instance, answer))


def open_world(key: str, data: str | None, report: Callable[[TaskVerdict], None]) -> StdioWorld:
    """Opens an app in a world of `data`, or a task by its key. Raises PlatformError."""
    if "-" not in key:
        return StdioWorld(Instance(seed_named(app_of(key), data or DEFAULT_DATA)), None, report)
    task = make_task(key)
    if data is not None:
        raise PlatformError(
            f"a task has its own data ({task.seed.key}); give {data} only with an app ({', '.join(APPS)})"
        )
    return StdioWorld(Instance(task.seed, variables=task.variables), task, report)


def serve_lines(world: StdioWorld, incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Serves until the input ends, and closes the instance."""
    try:
        for line in incoming:
            _, answer = mcp_answer(world, world.call, None, line) if line.strip() else (0, b"")
            if answer:
                outgoing.write(answer + b"\n")
                outgoing.flush()
        world.finish()
    finally:
        world.instance.close()


def _refused(error: dict[str, str]) -> ToolResult:
    return ToolResult(msgspec.json.encode(error).decode(), is_error=True)
