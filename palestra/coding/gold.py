"""A task's own solution, played as an agent would: what shows that a task can be solved."""

from __future__ import annotations

from palestra.coding.dockerfile import folder_files
from palestra.coding.environment import prepare, put, task_spec
from palestra.coding.errors import TaskError
from palestra.coding.task import CodingTask, TaskFile
from palestra.coding.verifier import CodingVerdict, verify
from palestra.sandbox import Sandbox, sandbox

SOLUTION = "/solution"


async def play_solution(
    task: CodingTask, backend: str = "local", command: str | None = None, *, host_folders: tuple[str, ...] = ()
) -> CodingVerdict:
    """Returns the verdict on the task's solution, or on what a shell command leaves (`true` does nothing). Raises
    TaskError if there is no solution or it fails, and what `verify` raises."""
    spec = await task_spec(task, backend, host_folders=host_folders, writable=(SOLUTION,) if command is None else ())
    async with sandbox(backend, spec) as box:
        await prepare(task, box)
        if command is None:
            await _solve(task, box)
        else:
            await box.exec(command)
        return await verify(task, box)


async def _solve(task: CodingTask, box: Sandbox) -> None:
    if task.solution is None:
        raise TaskError(f"{task.folder} has no solution/solve.sh or solution.sh to play")
    is_own_folder = task.solution.parent != task.folder
    files = folder_files(task.solution.parent, SOLUTION) if is_own_folder else []
    await put(box, files or [TaskFile(task.solution, f"{SOLUTION}/{task.solution.name}")])
    done = await box.exec(["/bin/bash", f"{SOLUTION}/{task.solution.name}"])
    if done.status:
        errors = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise TaskError(f"{task.solution} ended with status {done.status}: {errors[-1]}")
