"""Tasks of the local platform, tried on their worlds themselves: changes that the task does not ask for, calls by
chance, and tasks of the two splits that are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.audit.findings import AuditFinding, FindingKind, Severity, finding
from palestra.environments.fleet.platform_tasks import PLATFORM, platform_task
from palestra.environments.platform import Instance, PlatformError, PlatformTask, verify
from palestra.environments.platform.attackers import answer_only, random_calls, stray_write
from palestra.environments.platform.golden import play_golden
from palestra.types.rollouts import Task


def judge_platform(tasks: Sequence[Task]) -> list[AuditFinding]:
    """Tries those of the tasks that are the platform's."""
    keys = [str(task.extras["task_key"]) for task in tasks if _is_platforms(task)]
    found: list[AuditFinding] = []
    for key in keys:
        found += judge_platform_task(platform_task(key))
    return list({(one.kind, one.probe): one for one in reversed(found)}.values())


def _is_platforms(task: Task) -> bool:
    return "task_key" in task.extras and str(task.extras.get("tasks_file", "")).startswith(PLATFORM)


def judge_platform_task(task: PlatformTask) -> list[AuditFinding]:
    """Tries one task of the platform."""
    found: list[AuditFinding] = []
    with_stray = Instance(task.seed, variables=task.variables)
    try:
        answer = play_golden(task, with_stray).answer
        stray_write(task, with_stray)
        if verify(task, with_stray, answer).score:
            seen = "The solution, and what another task asks for, gets reward 1."
            kind = FindingKind.STRAY_CHANGE_PAYS
            found.append(finding(kind, Severity.ERROR, "changes something else, too", str(task.key), seen))
    except PlatformError:
        pass  # no other task of this world changes anything; that gold works is seen where it is played
    finally:
        with_stray.close()
    for attacker, name in ((random_calls, "makes 60 random calls"), (answer_only, "answers without a call")):
        instance = Instance(task.seed, variables=task.variables)
        try:
            if verify(task, instance, attacker(task, instance)).score:
                seen = f"A policy that {name} gets reward 1."
                found.append(finding(FindingKind.RANDOM_PAYS, Severity.ERROR, name, str(task.key), seen))
        finally:
            instance.close()
    return found
