"""The backend ssh, against an sshd of our own on this machine. It promises no wall, so nothing attacks it."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from palestra.sandbox import (
    EndpointProxy,
    Sandbox,
    SandboxEnded,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
    sandbox,
)
from palestra.util.programs import PROGRAMS, missing
from tests.sandbox.test_endpoint_proxy import ASK, endpoint  # noqa: F401
from tests.waiting import until

Result = TypeVar("Result")
SSHD = PROGRAMS["sshd"].find()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing("ssh", "sshd") is not None, reason=str(missing("ssh", "sshd"))),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An sshd with keys of its own; `ssh` finds it by the name `there`."""
    folder = tmp_path_factory.mktemp("sshd")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    settings = {"Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": "none"}
    settings |= {"AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "UsePAM": "no", "LogLevel": "QUIET"}
    (folder / "sshd.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    client = {"HostName": "127.0.0.1", "Port": port, "IdentityFile": folder / "user", "User": getpass.getuser()}
    client |= {"StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null", "LogLevel": "ERROR"}
    (folder / "ssh.conf").write_text("Host there\n" + "".join(f"  {name} {value}\n" for name, value in client.items()))
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh.conf "$@"\n')
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        process = subprocess.Popen([str(SSHD), "-D", "-f", folder / "sshd.conf"])
        until(lambda: _listens(port))
        yield
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def there(**settings: Any) -> Sandbox:
    return sandbox("ssh", SandboxSpec(host="there", **settings))


def test_commands_files_and_snapshots(server: None, tmp_path: Path) -> None:
    async def work() -> None:
        async with there(env={"KEY": "it's\na key"}, files={"in.txt": b"hello"}) as box:
            done = await box.exec('printf "%s|" "$KEY"; cat in.txt -; exit 3', stdin=b" there")
            assert (done.status, done.text) == (3, "it's\na key|hello there")
            await box.write("deep/file", bytes(range(256)))
            assert await box.read("deep/file") == bytes(range(256))
            assert (await box.exec("yes | head -c 100000", max_output=10)).stdout == b"y\ny\ny\ny\ny\n"
            assert (await box.exec("true", cwd="/none")).status == 126
            await box.snapshot(tmp_path / "state.tar")
        async with there(snapshot=tmp_path / "state.tar") as box:
            assert await box.read("in.txt") == b"hello"

    run(work())


def test_a_late_command_is_killed_there_and_the_folder_goes_with_the_sandbox(server: None) -> None:
    async def work() -> Path:
        async with there() as box:
            folder = Path((await box.exec("pwd")).text.strip())
            done = await box.exec("sleep 4711 & setsid sleep 4712; true", limit_s=0.5)
            assert done.is_late
            assert (await box.exec("ps -eo args | grep -c '^sleep 471[12]$'")).text == "0\n"
            await box.exec("setsid sleep 4713 >/dev/null 2>&1 & true")
        with pytest.raises(SandboxEnded, match="stopped"):
            await box.exec("true")
        return folder

    assert not run(work()).exists()
    assert ["sleep", "4713"] not in [one.info["cmdline"] for one in psutil.process_iter(["cmdline"])]


def test_the_endpoint_proxy_is_a_port_there(server: None, endpoint: str) -> None:  # noqa: F811
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        proxy = EndpointProxy(endpoint, port=port)
        async with there(endpoint_proxy=proxy, env={"URL": proxy.inside_url, "KEY": "k"}) as box:
            done = await box.exec(["/usr/bin/python3", "-c", ASK])
            assert done.text == "/v1/models Bearer k\n"

    run(work())


def test_a_machine_that_cannot_be_reached_is_named(server: None) -> None:
    with pytest.raises(SandboxUnavailable, match=r"nowhere\.invalid cannot be used"):
        run(_start(SandboxSpec(host="nowhere.invalid")))
    with pytest.raises(SandboxError, match="needs a machine"):
        run(_start(SandboxSpec()))


async def _start(spec: SandboxSpec) -> None:
    await sandbox("ssh", spec).start()
