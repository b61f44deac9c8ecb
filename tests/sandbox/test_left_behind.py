"""Whoever is killed, nothing stays: no process, no mount, no file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from palestra.sandbox import SandboxEnded, SandboxError, SandboxUnavailable, sandbox
from palestra.sandbox.local import bubblewrap
from palestra.sandbox.local import helpers as helpers_module
from tests.sandbox.conftest import Box, LoopThread, spec_for
from tests.sandbox.owner import MARK
from tests.waiting import until

NewBox = Callable[..., Box]


def left(mark: str = MARK) -> list[int]:
    """Processes of sandboxes with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().get("MARK", ""):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def fork_servers() -> list[psutil.Process]:
    """Processes of this one from which helpers are forked: one, as soon as there was a local sandbox."""
    return [one for one in psutil.Process().children() if _lives(one) and helpers_module.FORK_SERVER in one.cmdline()]


def helpers() -> set[int]:
    """Processes that this one has started or had forked, and that have not ended."""
    servers = fork_servers()
    forked = {one.pid for server in servers for one in server.children() if _lives(one)}
    return forked | {one.pid for one in psutil.Process().children() if _lives(one) and one not in servers}


def descriptors() -> int:
    """Open files, pipes and local sockets of this process. Network connections come and go in it by themselves, of
    clients that other tests have left."""
    local = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    count = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            kind, _, inode = str(file.readlink()).partition(":[")
            count += kind != "socket" or inode.rstrip("]") in local
    return count


def forked(server: psutil.Process) -> set[int]:
    """As `helpers`, but faster."""
    return {int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()}


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def of_user(user: int | None) -> set[int]:
    """Processes of the user of sandboxes; all bubblewraps, where that is the owner."""
    found: set[int] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == user or (user is None and process.name() == "bwrap"):
                found.add(process.pid)
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def owner(walled: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    image = spec_for(walled).image
    command = [sys.executable, "-m", "tests.sandbox.owner", walled, "2", *([image] if image else [])]
    root, env = Path(__file__).parents[2], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
        process.kill()


def test_nothing_is_left_when_the_owner_is_killed(owner: subprocess.Popen[str], walled: str, tmp_path: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    assert len(left()) >= 6
    owner.kill()
    owner.wait()
    until(lambda: not left(), details=lambda: str(left()))
    if walled == "local":
        assert Path("/proc/self/mounts").read_text() == mounts
        assert list(tmp_path.iterdir()) == []


def test_the_next_start_removes_what_a_killed_owner_left(
    owner: subprocess.Popen[str], walled: str, tmp_path: Path, loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    owner.kill()
    owner.wait()

    async def start() -> None:
        async with sandbox(walled, spec_for(walled)):
            pass

    loop.run(start())
    assert [file for file in tmp_path.rglob("*") if file.name == "owner.lock"] == []


def test_stopping_ends_everything(new_box: NewBox) -> None:
    box = new_box(env={"MARK": "palestra-to-stop"})
    box.sh("setsid sleep 1000 & (setsid sleep 1001 &) ; nohup sleep 1002 & true")
    assert left("palestra-to-stop")
    box.stop()
    assert not left("palestra-to-stop")


def test_a_cancelled_start_leaves_nothing(walled: str, loop: LoopThread) -> None:
    async def cancelled(after_s: float) -> None:
        async def start() -> None:
            async with sandbox(walled, spec_for(walled)):
                await asyncio.sleep(60)

        task = asyncio.ensure_future(start())
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = helpers()
    for after_s in (0.0, 0.02, 0.05, 0.1):
        loop.run(cancelled(after_s))
    until(lambda: helpers() <= before)


class TestLocal:
    """What is particular to processes that can be seen from here."""

    @pytest.fixture(autouse=True)
    def _only_local(self, walled: str) -> None:
        if walled != "local":
            pytest.skip("another backend's processes are not ours")

    def test_a_killed_helper_ends_its_command_and_no_other(self, new_box: NewBox, loop: LoopThread) -> None:
        box, before = new_box(), helpers()

        async def killed() -> None:
            running = asyncio.ensure_future(box.inner.exec("touch /tmp/begun; exec sleep 1000"))
            while (await box.inner.exec("test -e /tmp/begun")).status:
                pass
            for pid in helpers() - before:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(SandboxEnded):
                await running

        loop.run(killed())
        until(lambda: box.sh("ps -eo args | grep -c 'sleep 1000$'").text == "0\n")

    def test_whatever_is_killed_at_any_stage_nothing_is_left(self, walled: str, loop: LoopThread) -> None:
        """Helpers, bubblewrap, process 1 and commands: one of them is killed, now and then a little later."""

        async def one(after_s: float, choice: random.Random) -> None:
            async def use() -> None:
                async with sandbox(walled, spec_for(walled, env={"MARK": "palestra-chaos"})) as box:
                    await box.exec("setsid sleep 1000 & sleep 0.05")
                    await box.exec("true")

            using = asyncio.ensure_future(use())
            await asyncio.sleep(after_s)
            started = [one for one in psutil.Process().children(recursive=True) if one not in others]
            for process in choice.sample(started, min(len(started), 1)):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            with contextlib.suppress(SandboxError):
                await using

        async def begin() -> None:
            """The first sandbox of a process starts what stays for later ones."""
            async with sandbox(walled, spec_for(walled)) as box:
                await box.exec("true")

        loop.run(begin())
        others = psutil.Process().children(recursive=True)
        before, open_before = helpers(), descriptors()
        for place in range(20):
            loop.run(one(0.012 * place, random.Random(place)))
        until(lambda: helpers() <= before)
        until(lambda: not left("palestra-chaos"))
        until(lambda: descriptors() <= open_before)

    def test_a_bubblewrap_that_is_killed_as_it_starts_leaves_no_child(self, walled: str, loop: LoopThread) -> None:
        async def started() -> None:
            async with sandbox(walled, spec_for(walled, files={"x": b""})):
                raise SandboxUnavailable("it was there before it was killed")

        async def one(after_s: float) -> None:
            before = helpers()
            starting = asyncio.ensure_future(started())
            while not (found := {pid for pid in forked(server) - before if name_of(pid) == "bwrap"}):
                assert not starting.done()
                await asyncio.sleep(0)
            time.sleep(after_s)  # noqa: ASYNC251 - a busy loop would be late
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(SandboxError):
                await starting

        user = bubblewrap.unprivileged_user()
        with pytest.raises(SandboxUnavailable):
            loop.run(started())
        (server,) = fork_servers()
        before = of_user(user)
        for place in range(8):
            loop.run(one(0.001 * place))
        until(lambda: of_user(user) <= before, details=lambda: str(of_user(user) - before))

    def test_a_killed_bubblewrap_ends_its_sandbox(self, new_box: NewBox) -> None:
        before = helpers()
        box = new_box(env={"MARK": "palestra-killed"})
        box.sh("sleep 1000 & true")
        for pid in helpers() - before:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not left("palestra-killed"))
        with pytest.raises(SandboxEnded, match="has ended"):
            box.sh("true")

    def test_sandboxes_end_with_the_process_that_forks_helpers_and_others_can_be_made(self, new_box: NewBox) -> None:
        box = new_box(env={"MARK": "palestra-forked"})
        box.sh("sleep 1000 & true")
        (server,) = fork_servers()
        server.kill()
        until(lambda: not left("palestra-forked"))
        with pytest.raises(SandboxEnded, match="has ended"):
            box.sh("true")
        assert new_box().sh("echo new").text == "new\n"
        assert server not in fork_servers()
