"""The local platform: task apps whose state is a small database, their tasks, verifiers that look at what changed.

Begin at `app` and `instance`.
"""

from palestra.environments.platform.app import App, Size, TaskTemplate
from palestra.environments.platform.catalog import APPS, app_of, template_of
from palestra.environments.platform.errors import PlatformError, ToolError
from palestra.environments.platform.expectations import FREE, Deleted, Expected, Inserted, Text, Updated
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.task_records import PlatformTask, TaskKey
from palestra.environments.platform.tasks import make_task
from palestra.environments.platform.templates import Answer, AnswerKind, Call, Calls
from palestra.environments.platform.toolbox import Tool, tool
from palestra.environments.platform.verdicts import Verdict, verify
from palestra.net.mcp import ToolResult

__all__ = [
    "APPS",
    "FREE",
    "Answer",
    "AnswerKind",
    "App",
    "Call",
    "Calls",
    "Deleted",
    "Expected",
    "Inserted",
    "Instance",
    "PlatformError",
    "PlatformTask",
    "Size",
    "TaskKey",
    "TaskTemplate",
    "Text",
    "Tool",
    "ToolError",
    "ToolResult",
    "Updated",
    "Verdict",
    "app_of",
    "make_task",
    "template_of",
    "tool",
    "verify",
]
