"""Nothing is found in what comes with Palestra."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from palestra.audit import AuditReport, AuditSettings, audit, audit_coding, audit_target
from palestra.audit.targets import targets_named
from palestra.coding import CodingTask, read_tasks
from palestra.coding.shipped_tasks import SHIPPED
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.platform import APPS
from palestra.gym.search_folders import SHIPPED as SHIPPED_GYM
from tests.sandbox.needs import needs_local

SETTINGS = AuditSettings(limit=4, fresh_process=False, in_a_row=0, slow_s=60)
TEMPLATES = [f"{app.key}-{template.name}" for app in APPS.values() for template in app.templates]
SERVERS = sorted(one.name for one in (SHIPPED_GYM / "resources_servers").iterdir() if (one / "data").is_dir())


def audited(name: str, folder: Path, settings: AuditSettings = SETTINGS) -> AuditReport:
    (target,) = targets_named(name, folder)
    return asyncio.run(audit_target(target, settings))


def shown(report: AuditReport) -> list[str]:
    return [f"{one.kind}: {one.probe}: {one.task}: {one.seen}" for one in report.findings] + report.notes


@pytest.mark.parametrize("name", ["arithmetic", pytest.param("stockroom", marks=pytest.mark.slow)])
def test_bundled_environments(tmp_path: Path, name: str) -> None:
    assert shown(audited(name, tmp_path)) == []


def test_questions_of_a_file(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Name word {n}.", "answer": word} for n, word in enumerate(["otter", "birch", "quartz", "fjord"])
    ]
    (tmp_path / "words.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    entry = EnvironmentEntry(name="answers", tasks=tmp_path / "words.jsonl")
    assert shown(asyncio.run(audit(entry, SETTINGS))) == []


@pytest.mark.parametrize(
    "template",
    [pytest.param(one, marks=[] if one == "mail-move_only" else pytest.mark.slow) for one in TEMPLATES],
)
def test_templates_of_the_platform(tmp_path: Path, template: str) -> None:
    assert shown(audited(template, tmp_path, replace(SETTINGS, limit=2, at_once=4))) == []


@needs_local
@pytest.mark.slow
@pytest.mark.parametrize("task", read_tasks(SHIPPED), ids=lambda task: task.id)
def test_coding_tasks(task: CodingTask) -> None:
    assert shown(asyncio.run(audit_coding([task], AuditSettings(slow_s=60)))) == []


@pytest.mark.e2e
@pytest.mark.parametrize("server", SERVERS)
def test_servers_of_a_gym(tmp_path: Path, server: str) -> None:
    report = audited(f"gym:{server}", tmp_path)
    assert [one for one in shown(report) if not one.startswith("no solution is known")] == []
