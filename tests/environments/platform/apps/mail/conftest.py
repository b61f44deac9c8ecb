"""Mailboxes to try tools in, and tasks with the calls that solve them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from palestra.environments.platform import APPS, Instance, PlatformTask, SeedSize, SolutionCall, TaskTemplate
from palestra.environments.platform.golden import play_golden
from tests.environments.platform.conftest import FEW, tasks_of

MAIL = APPS["mail"]
TEMPLATES = {template.name: template for template in MAIL.templates}
WRITES = {tool.name for tool in MAIL.tools if tool.writes}
counted = pytest.mark.parametrize("count", [FEW, pytest.param(200, marks=pytest.mark.slow)])


def tasks(template: TaskTemplate, count: int) -> list[PlatformTask]:
    return tasks_of("mail", template, count)


def solved(task: PlatformTask) -> tuple[list[SolutionCall], str | None]:
    """The calls that change something, as the solution makes them, and its answer."""
    played = play_golden(task, Instance(task.seed))
    return [call for call, _ in played.steps if call.tool in WRITES], played.answer


class Mailbox:
    """An instance, called by name."""

    def __init__(self, size: SeedSize = SeedSize.SMALL, number: int = 0) -> None:
        self.instance = Instance.create(MAIL, number, size)
        self.me = self.instance.variables["LOGGED_IN_USER"]
        self.today = self.instance.variables["CURRENT_DATE"]
        self.first = self.rows("SELECT min(id) AS id FROM messages")[0]["id"]

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        result = self.instance.call(tool, arguments)
        assert not result.is_error, result.text
        return msgspec.json.decode(result.text)

    def refused(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """What the model is told; and nothing has changed."""
        before = self.instance.state_hash()
        result = self.instance.call(tool, arguments)
        assert result.is_error, result.text
        assert self.instance.state_hash() == before
        return msgspec.json.decode(result.text)

    def rows(self, query: str, *args: object) -> list[dict[str, Any]]:
        cursor = self.instance.connection.execute(query, args)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]


@pytest.fixture
def box() -> Mailbox:
    return Mailbox()
