"""Images of tasks, for docker and podman: built once, by what is in their folders."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from palestra.coding.dockerfile import folder_files
from palestra.coding.errors import TaskError
from palestra.coding.task import CodingTask
from palestra.coding.terminal_bench import HIDDEN
from palestra.sandbox.commands import PACK
from palestra.util.atomic_files import replacing
from palestra.util.processes import PIPE, spawn

PROGRAMS = ("docker", "podman")
NAME = "palestra-task"


async def task_image(task: CodingTask, program: str) -> tuple[str, Path]:
    """Returns the name of the task's image and an archive of its working folder. Raises TaskError if it cannot be
    built."""
    image = task.image or await _built(task, program)
    digest = hashlib.sha256(f"{program} {image} {task.workdir}".encode()).hexdigest()[:24]
    archive = _archives() / f"{digest}.tar"
    if not archive.exists():
        command = f'mkdir -p -- "$0" && cd -- "$0" && {{ {PACK} }}'
        run = [
            program,
            "run",
            "--rm",
            "--network",
            "none",
            "--entrypoint",
            "/bin/sh",
            image,
            "-c",
            command,
            task.workdir,
        ]
        with replacing(archive) as file:
            file.write(await _output(task, run))
    return image, archive


async def _built(task: CodingTask, program: str) -> str:
    if task.dockerfile is None or task.build_context is None:
        raise TaskError(
            f"{task.folder} has no Dockerfile, and no environment.docker_image: {program} needs one of them"
        )
    with tempfile.TemporaryDirectory() as folder:
        digest = hashlib.sha256()
        hidden = HIDDEN if task.build_context == task.folder else ()
        for file in folder_files(task.build_context, "", hidden):
            copied = Path(folder) / file.path
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.source, copied)
            digest.update(f"{file.path}\0{copied.stat().st_mode}\0".encode() + copied.read_bytes())
        image = f"{NAME}:{digest.hexdigest()[:24]}"
        if await _status([program, "image", "inspect", image]):
            dockerfile = Path(folder) / task.dockerfile.name
            await _output(task, [program, "build", "--quiet", "--tag", image, "--file", str(dockerfile), folder])
    return image


@cache
def _archives() -> Path:
    """A folder of this process: an image may be built anew under the same name."""
    folder = tempfile.TemporaryDirectory(prefix="palestra-task-images-")
    _kept.append(folder)
    return Path(folder.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


async def _status(command: Sequence[str]) -> int:
    process = await spawn(*command, stdout=PIPE, stderr=PIPE)
    await process.communicate()
    return process.returncode or 0


async def _output(task: CodingTask, command: Sequence[str]) -> bytes:
    process = await spawn(*command, stdout=PIPE, stderr=PIPE)
    output, errors = await process.communicate()
    if process.returncode:
        error_lines = errors.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
        raise TaskError(f"the image of {task.folder} cannot be made: `{' '.join(command[:2])}` said: {error_lines[-1]}")
    return output
