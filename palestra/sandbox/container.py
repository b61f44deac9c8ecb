"""The backends `docker` and `podman`: OCI images, run by the command line of either."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import subprocess
import uuid
from asyncio.subprocess import Process
from typing import Self

from palestra.sandbox import first_process, seccomp
from palestra.sandbox.commands import KILL_MARKED, MARK, PATIENCE_S, Command, CommandSandbox
from palestra.sandbox.endpoint_proxy import EndpointRelay
from palestra.sandbox.errors import SandboxEnded, SandboxError, SandboxUnavailable
from palestra.sandbox.forwarder import FORWARDER
from palestra.sandbox.owned_folders import OwnedFolder, abandoned
from palestra.sandbox.spec import SandboxSpec
from palestra.util.processes import DEVNULL, PIPE, GroupLeader, kill, spawn, stop

START_S, ANSWER_S = 120.0, 30.0
FEW = 16384
USER, HOME = "1000:1000", "/tmp"
LABEL = "palestra.sandbox"
PROXY_FOLDER = "/run/palestra"
SHARES = {"work": 12, HOME: 3, "shm": 1}
"""Sixteenths of the disk limit: each folder that can be written is a file system in memory of its own."""
RUN = 'cd -- "$0" || exit 126; exec "$@"'
RUN_AND_READ = 'cd -- "$0" || exit 126; "$@"; status=$?; cat >/dev/null; exit $status'
"""Podman loses the output of a command that ends before it has read its input."""
CLIENT_VARIABLES = ("PATH", "HOME", "USER", "XDG_RUNTIME_DIR", "TMPDIR", "LANG")
CLIENT_PREFIXES = ("DOCKER_", "CONTAINER", "PODMAN_", "DBUS_", "BUILDAH_", "STORAGE_")


class DockerSandbox(CommandSandbox):
    """A container without a network and without capabilities, whose root is read only."""

    program = "docker"
    tmpfs_options = ""
    options: tuple[str, ...] = ()

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._name = f"palestra-sandbox-{uuid.uuid4().hex[:16]}"
        self._client: Process | None = None
        self._folder: OwnedFolder | None = None
        self._relay: EndpointRelay | None = None
        self._forwarder: asyncio.Task[object] | None = None
        self._marks: dict[int, str] = {}

    @classmethod
    def problem(cls) -> str | None:
        if shutil.which(cls.program) is None:
            return f"{cls.program} is not installed"
        try:
            probe = subprocess.run(
                [cls.program, "ps", "-q"], capture_output=True, text=True, check=False, stdin=DEVNULL, timeout=ANSWER_S
            )
        except subprocess.TimeoutExpired:
            return f"{cls.program} does not answer"
        errors = probe.stderr.strip().splitlines()
        return f"{cls.program} does not run: {errors[-1] if errors else probe.returncode}" if probe.returncode else None

    async def start(self) -> Self:
        if self._client is not None:
            raise SandboxError("the sandbox was started before")
        if self.spec.image is None:
            raise SandboxError(f"a sandbox of {self.program} needs an image: SandboxSpec(image=…)")
        if problem := await asyncio.to_thread(self.problem):
            raise SandboxUnavailable(problem)
        try:
            await self._sweep()
            self._folder = OwnedFolder()
            await self._run_container(self._folder)
            if (await self.exec(f"test -w . && test -w {HOME}")).status:
                raise SandboxUnavailable(
                    f"{self.spec.workdir} or {HOME} of the image has a mode without the right to write"
                )
            if self.spec.endpoint_proxy is not None:
                await self._open_proxy(self._folder)
        except BaseException:  # cancelled, too: nothing may be left
            await self.stop()
            raise
        return self

    async def _run_container(self, folder: OwnedFolder) -> None:
        command = [self.program, "run", "--rm", "--interactive", "--name", self._name]
        (folder.path / "seccomp.json").write_text(json.dumps(seccomp.contained_profile()), encoding="utf-8")
        command += ["--label", f"{LABEL}={folder.path}", "--security-opt", f"seccomp={folder.path}/seccomp.json"]
        command += [*self._walls(), *self._limits(), *self._folders(folder)]
        names, client_env = self._environment(dict(self.spec.env))
        command += [*names, "--env", f"HOME={HOME}", "--entrypoint", first_process.PATH, str(self.spec.image)]
        self._client = await spawn(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=client_env)
        assert self._client.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                is_ready = await self._client.stdout.readline() == b"\n"
        except TimeoutError:
            is_ready = False
        if not is_ready:
            raise SandboxUnavailable(f"the sandbox did not start: {await _last_output(self._client)}")

    def _walls(self) -> list[str]:
        walls = ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        return [*walls, *self.options, "--user", USER, "--hostname", "sandbox", "--workdir", "/"]

    def _limits(self) -> list[str]:
        limits = self.spec.limits
        memory = str(limits.memory_bytes + limits.disk_bytes)  # what is written counts as memory, too
        found = ["--memory", memory, "--memory-swap", memory, "--cpus", f"{limits.cpus:g}"]
        found += ["--pids-limit", str(limits.processes), "--ulimit", "nofile=1024:1024", "--ulimit", "core=0:0"]
        _, most = resource.getrlimit(resource.RLIMIT_NPROC)
        few = FEW if most == resource.RLIM_INFINITY else min(FEW, most // 2)
        found += ["--ulimit", f"nproc={few}:{few}"]  # podman's own is one that not every root may set
        return found

    def _folders(self, folder: OwnedFolder) -> list[str]:
        sixteenth = self.spec.limits.disk_bytes // 16
        found = ["--shm-size", str(SHARES["shm"] * sixteenth)]
        more = dict.fromkeys(self.spec.writable)
        each = SHARES["work"] // 4 * sixteenth // len(more) if more else 0  # of what the working folder has otherwise
        sizes = {**dict.fromkeys(more, each), HOME: SHARES[HOME] * sixteenth}
        sizes[self.spec.workdir] = SHARES["work"] * sixteenth - each * len(more)
        for path, size in sizes.items():
            options = f"rw,exec,nosuid,nodev,mode=1777,size={size}{self.tmpfs_options}"
            found += ["--tmpfs", f"{path}:{options}"]
        first = folder.path / "first-process"
        first.write_bytes(first_process.executable())
        first.chmod(0o555)
        found += ["--mount", f"type=bind,source={first},target={first_process.PATH},readonly"]
        for path in self.spec.host_folders:
            found += ["--mount", f"type=bind,source={path},target={path},readonly"]
        if self.spec.endpoint_proxy is not None:
            (folder.path / "proxy").mkdir()
            found += ["--mount", f"type=bind,source={folder.path / 'proxy'},target={PROXY_FOLDER},readonly"]
        return found

    async def _open_proxy(self, folder: OwnedFolder) -> None:
        """A Unix socket outside, and a process inside that carries connections to it."""
        assert self.spec.endpoint_proxy is not None
        path = folder.path / "proxy" / "model.sock"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        path.chmod(0o666)
        folder.path.chmod(0o711)
        listening.listen(64)
        self._relay = await EndpointRelay(self.spec.endpoint_proxy).open(listening)
        command = ["python3", "-c", FORWARDER, f"{PROXY_FOLDER}/model.sock", str(self.spec.endpoint_proxy.port)]
        self._forwarder = asyncio.create_task(self.exec(command, limit_s=float("inf")), name="sandbox endpoint proxy")
        ready = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 1)"
        for _ in range(50):
            if not (await self.exec(["python3", "-c", ready, str(self.spec.endpoint_proxy.port)])).status:
                return
            await asyncio.sleep(0.1)
        raise SandboxUnavailable("the sandbox did not start: an endpoint proxy needs python3 in the image")

    async def _begin(self, command: Command, streams: tuple[int, int, int]) -> Process:
        if reason := self._why_ended():
            raise SandboxEnded(reason)
        mark = uuid.uuid4().hex
        names, client_env = self._environment({**command.env, MARK: mark})
        if command.has_input:
            names += ["--interactive"]
        shell = ["/bin/sh", "-c", RUN_AND_READ if command.has_input else RUN, command.cwd]
        process = await spawn(
            *(self.program, "exec", *names, self._name, *shell, *command.arguments),
            stdin=streams[0] if command.has_input else DEVNULL,
            stdout=streams[1],
            stderr=streams[2],
            env=client_env,
        )
        self._marks[process.pid] = mark
        return process

    async def _end(self, process: GroupLeader) -> None:
        """The client's end would leave the command running: it is killed inside, with all that has its mark."""
        mark = self._marks.pop(process.pid)
        killing = await spawn(self.program, "exec", self._name, "/bin/sh", "-c", KILL_MARKED, mark, env=_client_env())
        await killing.wait()
        await stop(process, PATIENCE_S)

    def _environment(self, wanted: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """Returns options, and the client's own environment. Values go by that, since every user can read a command
        line; only those that the client needs itself stand on it, such as PATH."""
        client, options = _client_env(), []
        for name, value in wanted.items():
            options += ["--env", f"{name}={value}" if name in client else name]
        return options, {**wanted, **client}

    def _why_ended(self) -> str | None:
        if self._client is None or self._folder is None:
            return "the sandbox is not started, or was stopped"
        return None if self._client.returncode is None else "the sandbox has ended"

    async def stop(self) -> None:
        await asyncio.shield(asyncio.ensure_future(self._stop()))

    async def _stop(self) -> None:
        folder, self._folder = self._folder, None
        if self._forwarder is not None:
            self._forwarder.cancel()
            await asyncio.gather(self._forwarder, return_exceptions=True)
        if self._relay is not None:
            await self._relay.close()
        if self._client is not None:
            await self._remove(self._name)
            await kill(self._client)
        if folder is not None:
            folder.remove()

    async def _remove(self, *names: str) -> None:
        for command in (["kill"], ["rm", "--force", "--volumes"]):  # to remove one that runs, podman would wait for it
            removing = await spawn(self.program, *command, *names, env=_client_env())
            await removing.wait()

    async def _sweep(self) -> None:
        """Removes containers, and then folders, whose owner was killed."""
        for folder in await asyncio.to_thread(abandoned):
            filters = ["--filter", f"label={LABEL}={folder}"]
            listing = await spawn(self.program, "ps", "-aq", *filters, stdout=PIPE, env=_client_env())
            names, _ = await listing.communicate()
            if names.split():
                await self._remove(*names.decode().split())
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class PodmanSandbox(DockerSandbox):
    """The same by podman, which needs no daemon and, where it is set up so, no root."""

    program = "podman"
    tmpfs_options = ",notmpcopyup"  # it would copy the mode of the image's folder, too
    options = ("--read-only-tmpfs=false",)


def _client_env() -> dict[str, str]:
    """Returns the variables by which the client finds its daemon and its settings."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in CLIENT_VARIABLES or name.startswith(CLIENT_PREFIXES)
    }


async def _last_output(client: Process) -> str:
    await kill(client)
    assert client.stderr is not None
    errors = (await client.stderr.read()).decode(errors="replace").split()
    return " ".join(errors) or "it took too long"
