"""The verifier: judges what an agent left in its sandbox, in sandboxes of its own.

Each part starts from a copy of the agent's working folder in a new sandbox without a network. Nothing else of the
agent's comes in: not its processes, environment, home or programs. Files that change what a test run does are put back
as the task has them, and the tests are put in last.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from palestra.coding import parts
from palestra.coding.errors import BrokenWork, TaskError, VerifierError
from palestra.coding.scratch import scratch_folder
from palestra.coding.task import CodingTask, RewardPart
from palestra.coding.work import AgentWork, changes
from palestra.sandbox import Sandbox, SandboxError


@dataclass(frozen=True, slots=True)
class CodingVerdict:
    """What the verifier found."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """Value of each part by its name, before weights; and what a test script names beside its reward."""
    log: str = ""
    """What the verifier printed, part after part. It may show the tests: it is not for the agent."""
    seconds: float = 0.0


async def verify(task: CodingTask, sandbox: Sandbox) -> CodingVerdict:
    """Judges the work in the sandbox, which goes on as it was; to be called when the agent has ended. Raises
    VerifierError where the verifier itself fails, and SandboxError where the agent's sandbox has ended."""
    began = time.monotonic()
    values: dict[str, float] = {}
    named: dict[str, float] = {}
    logs: list[str] = []
    with scratch_folder() as folder:
        work = await _taken(task, sandbox, folder)
        for part in task.parts:
            found = await _judged(part, work)
            values[part.name] = found.value
            named |= found.named
            logs.append(f"== {part.name}: {found.value:g}\n{found.log}".rstrip())
    for part in task.parts:
        if part.requires is not None and values[part.requires] < 1:
            values[part.name] = 0.0
    reward = sum(part.weight * values[part.name] for part in task.parts)
    return CodingVerdict(reward, {**named, **values}, "\n".join(logs), time.monotonic() - began)


async def diff(task: CodingTask, sandbox: Sandbox) -> str:
    """Returns what changed in the working folder since the task began, as a patch. Raises VerifierError and
    SandboxError as `verify` does."""
    with scratch_folder() as folder:
        work = await _taken(task, sandbox, folder)
        try:
            return await changes(work)
        except BrokenWork:
            raise
        except (SandboxError, TaskError) as error:
            raise VerifierError(f"the changes of {task.id} cannot be found out: {error}") from error


async def _taken(task: CodingTask, sandbox: Sandbox, folder: Path) -> AgentWork:
    await sandbox.snapshot(folder / "work.tar")
    return AgentWork(task, type(sandbox), replace(sandbox.spec, endpoint_proxy=None, files={}), folder / "work.tar")


async def _judged(part: RewardPart, work: AgentWork) -> parts.PartValue:
    try:
        return await parts.KINDS[part.kind](part, work)
    except BrokenWork as error:
        return parts.PartValue(0.0, str(error))
    except (SandboxError, TaskError) as error:
        raise VerifierError(f"the part {part.name!r} of {work.task.id} cannot be judged: {error}") from error
