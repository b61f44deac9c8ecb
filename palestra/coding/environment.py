"""A task's sandbox: what it is started with, and the files that are put in before the agent begins."""

from __future__ import annotations

import io
import math
import shlex
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from palestra.coding.errors import TaskError
from palestra.coding.images import PROGRAMS, task_image
from palestra.coding.task import CodingTask, RunStep, TaskFile
from palestra.sandbox import EndpointProxy, Sandbox, SandboxLimits, SandboxSpec

BUILD_S = 120.0
PROCESSES = 512


async def task_spec(
    task: CodingTask,
    backend: str = "local",
    *,
    env: Mapping[str, str] | None = None,
    endpoint_proxy: EndpointProxy | None = None,
    host_folders: tuple[str, ...] = (),
    writable: tuple[str, ...] = (),
) -> SandboxSpec:
    """Returns what a sandbox for an agent on this task is started with. With docker and podman, the task's image is
    built first. Raises TaskError if the task cannot be played with that backend, and says why."""
    if problem := problem_with(task, backend):
        raise TaskError(problem)
    image, snapshot = await task_image(task, backend) if backend in PROGRAMS else (None, None)
    limits = task.limits
    return SandboxSpec(
        image=image,
        snapshot=snapshot,
        workdir=task.workdir,
        writable=tuple(dict.fromkeys((*_folders_beside(task), *writable))),
        env={**task.env, **(env or {})},
        endpoint_proxy=endpoint_proxy,
        host_folders=host_folders,
        limits=SandboxLimits(
            cpus=math.ceil(limits.cpus),
            memory_bytes=limits.memory_bytes,
            disk_bytes=limits.disk_bytes,
            processes=PROCESSES,
            exec_s=limits.agent_s,
        ),
    )


def problem_with(task: CodingTask, backend: str) -> str | None:
    """Returns why a task cannot be played with a backend, and what to do about it; None: nothing is known."""
    if task.needs_network:
        return (
            f"{task.id} cannot be verified in a sandbox, which has no network: {task.needs_network}\n"
            "  have its image bring what the tests need, or set `local = true` in [palestra] if they work without"
        )
    if task.needs_image and backend not in PROGRAMS:
        return (
            f"{task.id} cannot be played with the backend {backend!r}, only with docker or podman: {task.needs_image}\n"
            "  set `local = true` in [palestra] of its task.toml if the programs of this machine will do"
        )
    return None


def _folders_beside(task: CodingTask) -> list[str]:
    """Folders of the environment that are not in the working folder, by their first part."""
    paths = [PurePosixPath(one.path).parent if isinstance(one, TaskFile) else one.cwd for one in task.steps]
    outside = [PurePosixPath(one) for one in paths if not PurePosixPath(one).is_relative_to(task.workdir)]
    return sorted({f"/{one.parts[1]}" for one in outside if len(one.parts) > 1} - {"/tmp", "/home", "/dev"})


async def prepare(task: CodingTask, sandbox: Sandbox) -> None:
    """Puts the environment's files into a sandbox that was started by `task_spec`; never the tests or the solution.
    Raises TaskError if a command of its Dockerfile fails, and SandboxError."""
    if sandbox.spec.snapshot is not None:
        return  # it began with them
    waiting: list[TaskFile] = []
    for step in task.steps:
        if isinstance(step, TaskFile):
            waiting.append(step)
            continue
        await put(sandbox, waiting)
        waiting = []
        await _run(task, step, sandbox)
    await put(sandbox, waiting)


async def _run(task: CodingTask, step: RunStep, sandbox: Sandbox) -> None:
    command = f"mkdir -p {shlex.quote(step.cwd)} && cd {shlex.quote(step.cwd)} && {step.command}"
    done = await sandbox.exec(command, limit_s=BUILD_S, cwd="/")
    if done.status:
        errors = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.status}"]
        raise TaskError(f"{task.dockerfile}: RUN {step.command[:100]} failed without an image: {errors[-1]}")


async def put(sandbox: Sandbox, files: Iterable[TaskFile]) -> None:
    """Puts files of this machine into a sandbox, by one command. Raises TaskError where that fails."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in files:
            entry = tarfile.TarInfo(file.path.lstrip("/"))
            data = file.source.read_bytes()
            entry.size, entry.mode = len(data), 0o755 if file.source.stat().st_mode & 0o100 else 0o644
            archive.addfile(entry, io.BytesIO(data))
        if not archive.getmembers():
            return
    done = await sandbox.exec(["tar", "-x", "-o", "-C", "/"], stdin=packed.getvalue(), cwd="/", limit_s=BUILD_S)
    if done.status:
        errors = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.status}"]
        raise TaskError(f"files cannot be put into the sandbox: {errors[0]}")
