"""The work of an agent: copies of its folder in new sandboxes, and what it changed."""

from __future__ import annotations

import shlex
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from palestra.coding.dockerfile import folder_files
from palestra.coding.environment import prepare, put
from palestra.coding.errors import BrokenWork, TaskError
from palestra.coding.scratch import scratch_folder
from palestra.coding.task import CodingTask, TaskFile
from palestra.sandbox import Sandbox, SandboxEnded, SandboxError, SandboxSpec, SandboxUnavailable
from palestra.sandbox.spec import MIB

TESTS, LOGS = "/tests", "/logs"
MOST_BYTES = 256 * MIB
IGNORED = ("__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache", "node_modules")
"""Folders that tools leave, which are not part of the work."""
PATCH_S = 120.0
NO_BASE = 99  # a status that git and tar do not end with
EXCLUDED = " ".join(f"':(exclude,glob)**/{one}/**'" for one in IGNORED)
GIT = "git --git-dir=/tmp/base.git --work-tree=. -c core.quotePath=false -c user.name=base -c user.email=base@localhost"


@dataclass(frozen=True, slots=True)
class AgentWork:
    """The agent's working folder as it was when the agent had ended."""

    task: CodingTask
    kind: type[Sandbox]
    spec: SandboxSpec
    """The agent's sandbox, without its endpoint proxy."""
    archive: Path

    @asynccontextmanager
    async def copy(self, *, env: Mapping[str, str] | None = None, has_tests: bool = False) -> AsyncIterator[Sandbox]:
        """A new sandbox with a copy of the work, in which protected files are as the task has them. Raises BrokenWork
        if what the agent left cannot be copied."""
        spec = replace(
            self.spec,
            snapshot=self.archive,
            env={**self.task.env, **(env or {})},
            writable=tuple(dict.fromkeys((*self.spec.writable, TESTS, LOGS))),
            limits=replace(self.spec.limits, exec_s=self.task.limits.verifier_s),
        )
        async with AsyncExitStack() as stack:
            try:
                sandbox = await stack.enter_async_context(self.kind(spec))
                await self._restore(sandbox)
            except (SandboxUnavailable, SandboxEnded):
                raise
            except (SandboxError, TaskError) as error:
                raise BrokenWork(f"what the agent left cannot be copied: {error}") from error
            if has_tests and self.task.tests is not None:
                await put(sandbox, folder_files(self.task.tests, TESTS))
                await put(sandbox, self._script_beside())
            yield sandbox

    def _script_beside(self) -> list[TaskFile]:
        """Terminal-Bench has the script beside its tests."""
        script = self.task.folder / str(self.task.test_script)
        return [TaskFile(script, f"{TESTS}/{script.name}")] if script.is_file() else []

    async def _restore(self, sandbox: Sandbox) -> None:
        """Outside the working folder, files of the environment are put in anew; in it, protected ones."""
        patterns = self.task.protect
        if patterns:
            names = " -o ".join(f"-name {shlex.quote(one)}" for one in patterns)
            remove = f"find . -name .git -prune -o \\( {names} \\) -prune -exec rm -rf {{}} +"
            done = await sandbox.exec(f"find . -type d ! -perm -700 -exec chmod u+rwx {{}} +; {remove}")
            if done.status:
                raise TaskError(f"protected files cannot be removed: {done.stderr.decode(errors='replace')[:200]}")
        if self.spec.snapshot is not None:
            await self._restore_from(self.spec.snapshot, sandbox)
        await put(sandbox, [one for one in self.task.files if self._is_ours(one.path) and self.spec.snapshot is None])

    def _is_ours(self, path: str) -> bool:
        if not PurePosixPath(path).is_relative_to(self.task.workdir):
            return True
        return any(fnmatch(PurePosixPath(path).name, pattern) for pattern in self.task.protect)

    async def _restore_from(self, archive: Path, sandbox: Sandbox) -> None:
        with tarfile.open(archive) as packed, scratch_folder() as folder:
            files: list[TaskFile] = []
            for number, entry in enumerate(packed):
                path = f"{self.task.workdir}/{entry.name}"
                content = packed.extractfile(entry) if entry.isfile() and self._is_ours(path) else None
                if content is not None:
                    (copied := folder / str(number)).write_bytes(content.read())
                    files.append(TaskFile(copied, path))
            await put(sandbox, files)


async def changes(work: AgentWork) -> str:
    """Returns the patch from the task's files to the agent's, made in a sandbox of its own. Raises TaskError if the
    task's own files cannot be compared, BrokenWork if the agent's cannot."""
    spec = replace(work.spec, env={}, limits=replace(work.spec.limits, exec_s=PATCH_S))
    async with work.kind(spec) as sandbox:
        await prepare(work.task, sandbox)
        if work.archive.stat().st_size > MOST_BYTES:
            raise BrokenWork(f"the working folder has more than {MOST_BYTES >> 20} MiB")
        add = f"{GIT} add --all --force -- . {EXCLUDED}"
        begin = f"{GIT} init -q && {add} && {GIT} commit -q --allow-empty -m base"
        replace_all = "find . -mindepth 1 -delete && tar -x -o"
        show = f"{add} && {GIT} diff --cached --no-color --no-ext-diff --no-textconv --binary HEAD"
        # In one go: entering a sandbox takes longer than all of it.
        command = f"{{ {begin}; }} </dev/null || exit {NO_BASE}; {replace_all} && {show}"
        done = await sandbox.exec(command, stdin=work.archive.read_bytes(), max_output=MOST_BYTES)
        if done.status:
            errors = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.status}"]
            kind = TaskError if done.status == NO_BASE else BrokenWork
            raise kind(f"the changes cannot be compared: {errors[-1]}")
        return done.text
