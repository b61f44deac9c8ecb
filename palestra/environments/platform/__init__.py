"""The local platform: task apps whose state is a small database, their tasks, and verifiers that check what changed.

Begin at `app` and `instance`.
"""

from typing import TYPE_CHECKING

from palestra.environments.platform.app import SeedSize, TaskApp, TaskTemplate
from palestra.environments.platform.catalog import APPS, app_of, template_of
from palestra.environments.platform.errors import PlatformError, ToolError
from palestra.environments.platform.expectations import FREE, DeletedRow, Expected, FreeText, InsertedRow, UpdatedRow
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.task_records import PlatformTask, TaskKey
from palestra.environments.platform.task_templates import AnswerKind, ExpectedAnswer, RequiredCalls, SolutionCall
from palestra.environments.platform.tasks import make_task
from palestra.environments.platform.tool_schemas import PlatformTool, tool
from palestra.environments.platform.verdicts import TaskVerdict, verify
from palestra.net.mcp import ToolResult
from palestra.util.renamed import renamed

__all__ = [
    "APPS",
    "FREE",
    "AnswerKind",
    "DeletedRow",
    "Expected",
    "ExpectedAnswer",
    "FreeText",
    "InsertedRow",
    "Instance",
    "PlatformError",
    "PlatformTask",
    "PlatformTool",
    "RequiredCalls",
    "SeedSize",
    "SolutionCall",
    "TaskApp",
    "TaskKey",
    "TaskTemplate",
    "TaskVerdict",
    "ToolError",
    "ToolResult",
    "UpdatedRow",
    "app_of",
    "make_task",
    "template_of",
    "tool",
    "verify",
]

if not TYPE_CHECKING:  # type checkers know the new names only
    __getattr__ = renamed(
        __name__,
        Answer="ExpectedAnswer",
        App="TaskApp",
        Call="SolutionCall",
        Calls="RequiredCalls",
        Deleted="DeletedRow",
        Inserted="InsertedRow",
        Size="SeedSize",
        Text="FreeText",
        Tool="PlatformTool",
        Updated="UpdatedRow",
        Verdict="TaskVerdict",
    )
