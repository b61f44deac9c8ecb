"""Requirements that only a project's build backend knows: its own code, such as a setup.py, computes them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from palestra.gym.errors import ServerStartError
from palestra.gym.requirements.folder_requirements import BuildBackend
from palestra.sandbox import ExecResult, SandboxError, SandboxSpec, sandbox
from palestra.util import processes

_CHILD = Path(__file__).with_name("metadata_child.py")
_WORKDIR, _PACKAGES = "/project", "packages"
_LIMIT_S = 120.0
_LARGEST_BYTES = 1024 * 1024
"""Larger files of a folder are data."""
_NOT_NEEDED = {".git", ".venv", "__pycache__"}
_LAST_LINES = 30


async def computed_requirements(
    folder: Path, backend: BuildBackend, packages: Path | None, *, is_allowed: bool
) -> list[str]:
    """Returns what the backend says. `packages` has what the backend requires; `is_allowed`: run the code as the user,
    without a sandbox. Raises ServerStartError. The folder itself is never written to."""
    arguments = [_CHILD.name, folder.name, backend.name, *backend.path]
    try:
        with tempfile.TemporaryDirectory(prefix="palestra-setup-") as place:
            archive = Path(place, "project.tar")
            await asyncio.to_thread(_pack, archive, {_CHILD.name: _CHILD, folder.name: folder, _PACKAGES: packages})
            done = await (_as_user if is_allowed else _in_sandbox)(arguments, archive)
    except SandboxError as error:
        raise ServerStartError(f"{_problem(folder)}; no sandbox can be had for it: {error}{_hint(folder)}") from None
    if done.status:
        output = "\n".join(done.stderr.decode(errors="replace").splitlines()[-_LAST_LINES:])
        where, hint = ("", "") if is_allowed else (" in a sandbox without a network", _hint(folder))
        raise ServerStartError(f"{_problem(folder)}; it failed{where} and printed:\n{output}{hint}")
    return json.loads(done.stdout)


def _problem(folder: Path) -> str:
    return f"{folder}: its own set-up code has to say what it requires (dynamic dependencies)"


def _hint(folder: Path) -> str:
    return f"\n  to run that code as you, without a sandbox: gym.allow_setup=[{folder.name}]"


def _pack(archive: Path, content: Mapping[str, Path | None]) -> None:
    """Packs files and folders, without large files, by their names in the archive."""

    def needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        is_needed = entry.isdir() or (entry.isfile() and entry.size <= _LARGEST_BYTES)
        return entry if is_needed and Path(entry.name).name not in _NOT_NEEDED else None

    with tarfile.open(archive, "w", dereference=True) as out:
        for name, place in content.items():
            if place is not None:
                out.add(place, name, filter=needed)


async def _in_sandbox(arguments: list[str], archive: Path) -> ExecResult:
    spec = SandboxSpec(workdir=_WORKDIR, snapshot=archive, env={"PYTHONPATH": f"{_WORKDIR}/{_PACKAGES}"})
    async with sandbox("local", spec) as box:
        return await box.exec(["python3", *arguments], limit_s=_LIMIT_S)


async def _as_user(arguments: list[str], archive: Path) -> ExecResult:
    folder = archive.parent
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    process = await processes.spawn(
        sys.executable,
        *arguments,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}/{_PACKAGES}"},
        stdout=processes.PIPE,
        stderr=processes.PIPE,
    )
    try:
        stdout, stderr = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    except TimeoutError:
        return ExecResult(status=1, stdout=b"", stderr=f"nothing within {_LIMIT_S:.0f} s".encode())
    finally:
        await processes.kill(process)
    return ExecResult(status=process.returncode or 0, stdout=stdout, stderr=stderr)
