"""Engine workers: started, watched, adopted, restarted.

Owns: the worker's process and its `Hello`. Never touches: models and requests, which its listener handles.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import psutil
import structlog

from palestra import __version__
from palestra.server.core.watchdog import RestartReason, Watchdog, WatchdogTimeouts
from palestra.server.core.worker_link import WorkerFrame, WorkerLink
from palestra.store.write_failures import WriteFailures
from palestra.types.engine import PRELOAD, PRELOAD_GO, Hello, ModelCard, Ping, Stop, WorkerConfig, WorkerHeartbeat
from palestra.util.files import replacing
from palestra.util.json_types import JsonObject
from palestra.util.log_files import last_error, last_output, open_log
from palestra.util.processes import spawn_blocking

log = structlog.get_logger()

PING_S = 5.0  # a worker gives up after 30 s of silence
ADOPT_S = 30.0  # a living worker says Hello once it is loaded and its present computation is done
BACK_OFF_S = (0.25, 10.0)
"""Pause before the next start: the first, and the longest one. It doubles while workers die before they are ready."""
STOP_S = 30.0
AT_ONCE = 32  # messages handled before others get their turn, even if thousands wait
RESPAWN_S = 2.0


class WorkerError(Exception):
    """The worker cannot run; the message says why."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    child: subprocess.Popen[bytes]
    log_start: int
    """Where its log begins in the file."""

    @classmethod
    def start(cls, config: WorkerConfig, log_file: Path, *, preload: bool = False) -> WorkerProcess:
        """Starts a worker. With `preload` it loads its model and waits until `WorkerHandle` goes on with it."""
        environment = os.environ | {"PALESTRA_WORKER": msgspec.json.encode(config).decode()}
        if config.threads:
            environment["OMP_NUM_THREADS"] = str(config.threads)
        if preload:
            environment[PRELOAD] = str(os.getpid())
        with open_log(log_file) as out:
            start = out.tell()
            return cls(spawn_blocking([sys.executable, "-m", "palestra.engine"], env=environment, output=out), start)


class WorkerListener(Protocol):
    def on_hello(self, worker: WorkerHandle, hello: Hello) -> None: ...
    def on_hello_again(self, worker: WorkerHandle, hello: Hello) -> None: ...
    def on_message(self, worker: WorkerHandle, frame: WorkerFrame) -> None: ...
    def on_exit(self, worker: WorkerHandle, ending: RestartReason) -> None: ...


class WorkerHandle:
    def __init__(
        self,
        name: str,
        config: WorkerConfig,
        listener: WorkerListener,
        *,
        log_file: Path,
        patience: WatchdogTimeouts,
        write_wait_s: float,
    ):
        self.name, self.config, self.listener = name, config, listener
        self.link = WorkerLink(config.address)
        self.card: ModelCard | None = None
        self._log_file = log_file
        self._log_start = 0
        """Where the log of the present process begins."""
        Path(config.state).mkdir(parents=True, exist_ok=True)
        self._pid_file = Path(config.state) / "worker.json"
        self._pid = 0
        self._child: subprocess.Popen | None = None
        self.preloaded: WorkerProcess | None = None
        """A process that has loaded the model already, for the first start."""
        self._worker_id = ""
        self._hello = asyncio.Event()
        self._watchdog = Watchdog(patience, self._put_down)
        self._ending = RestartReason.DIED
        """Why the present process will have ended."""
        self._starts_fail = WriteFailures(write_wait_s)
        self.start_error: OSError | None = None
        """Why the last start failed."""
        self.cannot_start = False
        """Whether starts have been failing for long."""
        self._stopping = False
        self._tasks: list[asyncio.Task] = []

    @property
    def is_adopted(self) -> bool:
        """Whether it was started by an earlier server."""
        return self._child is None

    async def start(self) -> None:
        """Returns when the worker is ready; raises WorkerError if it cannot start."""
        self._tasks.append(asyncio.create_task(self._listen(), name=f"listen {self.name}"))
        if await self._adopt():
            self._drop_preloaded()
        else:
            self._spawn()
        exits = asyncio.create_task(self._exited())
        hello = asyncio.create_task(self._hello.wait())
        done, _ = await asyncio.wait({exits, hello}, return_when=asyncio.FIRST_COMPLETED)
        hello.cancel()
        if hello not in done:
            raise WorkerError(f"{self.config.model} cannot be served: {self._why_it_ended()}")
        self._tasks.append(asyncio.create_task(self._watch(exits), name=f"watch {self.name}"))
        self._tasks.append(asyncio.create_task(self._ping(), name=f"ping {self.name}"))

    async def end_earlier(self) -> None:
        """Ends the worker of an earlier server, if it lives: its models are not the newest."""
        if self._find_earlier() is not None:
            self._kill()
            await self._exited()

    async def stop(self) -> None:
        """Stops the worker, which takes snapshots first; after a while it is killed."""
        self._stopping = True
        self._watchdog.on_exit()
        self.link.send(Stop())
        try:
            async with asyncio.timeout(STOP_S):
                await self._exited()
        except TimeoutError:
            log.warning("worker did not stop in time", worker=self.name, pid=self._pid)
            self._kill()
        await self.abandon()
        self._pid_file.unlink(missing_ok=True)

    async def abandon(self) -> None:
        """Leaves the process running."""
        self._stopping = True
        self._watchdog.on_exit()
        self._drop_preloaded()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.link.close()

    # Messages of the worker

    async def _listen(self) -> None:
        for number in itertools.count(1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                frame = await self.link.receive()
                match frame.message:
                    case Hello() as hello:
                        self._greet(hello)
                    case WorkerHeartbeat(pid=pid) as beat:
                        if pid == self._pid and not self._stopping:
                            self._watchdog.on_beat(beat)
                    case _:
                        self.listener.on_message(self, frame)
            except Exception:
                log.exception("a worker's message could not be handled", worker=self.name)

    def _greet(self, hello: Hello) -> None:
        if hello.pid != self._pid:
            return  # a worker that was given up; it exits when it hears nothing
        if hello.worker_id == self._worker_id:
            self.link.send(Ping())
            self.listener.on_hello_again(self, hello)
            return
        self._worker_id, self.card = hello.worker_id, hello.card
        self.link.welcome(hello)
        self._watchdog.on_hello()
        self.listener.on_hello(self, hello)
        self._hello.set()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self.link.send(Ping())

    # The process

    async def _adopt(self) -> bool:
        """Whether a worker of an earlier server lives, is what we would start, and answers."""
        known = self._find_earlier()
        if known is None:
            return False
        if (known.get("version"), known.get("config")) == (__version__, self._config_in_json):
            hello, exits = asyncio.create_task(self._hello.wait()), asyncio.create_task(self._exited())
            await asyncio.wait({hello, exits}, timeout=ADOPT_S, return_when=asyncio.FIRST_COMPLETED)
            hello.cancel()
            exits.cancel()
            if self._hello.is_set():
                log.info("adopted a running worker", worker=self.name, pid=self._pid)
                return True
        self._kill()
        await self._exited()
        return False

    @property
    def _config_in_json(self) -> JsonObject:
        """The config as it is read back from a file, where a tuple is a list."""
        return msgspec.json.decode(msgspec.json.encode(self.config))

    def _find_earlier(self) -> JsonObject | None:
        """Returns what is known about the worker of an earlier server; None if it does not live."""
        try:
            known = json.loads(self._pid_file.read_text())
            process = psutil.Process(known["pid"])
            alive = abs(process.create_time() - known["created"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, ValueError, KeyError, psutil.Error):
            return None
        if not alive:
            return None
        self._pid = known["pid"]
        return known

    def _spawn(self) -> None:
        process, self.preloaded = self.preloaded, None
        if process is not None and process.child.poll() is None:
            with replacing(Path(self.config.state) / PRELOAD_GO) as file:
                file.write(str(process.child.pid).encode())
        else:
            process = WorkerProcess.start(self.config, self._log_file)
        self._child, self._log_start = process.child, process.log_start
        self._pid, self._worker_id = self._child.pid, ""
        created = psutil.Process(self._pid).create_time()
        facts = {"pid": self._pid, "created": created, "version": __version__, "config": self._config_in_json}
        with replacing(self._pid_file) as file:
            file.write(json.dumps(facts).encode())
        self._watchdog.on_spawn()

    def _drop_preloaded(self) -> None:
        process, self.preloaded = self.preloaded, None
        if process is not None:
            process.child.kill()
            process.child.wait()

    def _try_spawn(self) -> bool:
        """Starts a process; a full disk or process table is no reason to give up for good."""
        try:
            self._spawn()
        except OSError as e:
            log.error("the worker could not be started; trying again", worker=self.name, error=str(e))
            self.start_error, self.cannot_start = e, self._starts_fail.failed()
            if self._child is not None and self._child.poll() is None and self._child.pid != self._pid:
                self._child.kill()
            return False
        self._starts_fail.worked()
        self.start_error, self.cannot_start = None, False
        return True

    async def _watch(self, exits: asyncio.Task) -> None:
        """Restarts the worker whenever it has died."""
        first_wait, longest_wait = BACK_OFF_S
        wait_s = first_wait
        while True:
            await exits
            self._watchdog.on_exit()
            self.link.hang_up()
            was_ready, ending = self._hello.is_set(), self._ending
            self._hello.clear()
            self._ending = RestartReason.DIED
            if self._stopping:
                return
            words = last_output(self._log_file)
            log.warning("the worker ended", worker=self.name, pid=self._pid, ending=str(ending), last_words=words)
            self.listener.on_exit(self, ending)
            wait_s = first_wait if was_ready else min(longest_wait, wait_s * 2)
            await asyncio.sleep(wait_s)
            while not self._try_spawn():  # noqa: ASYNC110 - there is no event for room on a disk
                await asyncio.sleep(RESPAWN_S)
            exits = asyncio.create_task(self._exited())

    async def _exited(self) -> None:
        if self._child is not None and self._child.pid == self._pid and self._child.poll() is not None:
            return
        if hasattr(os, "pidfd_open"):
            await _pidfd_exit(self._pid)
        else:  # not on Linux
            with contextlib.suppress(psutil.NoSuchProcess):
                await asyncio.to_thread(psutil.Process(self._pid).wait)
        if self._child is not None and self._child.pid == self._pid:
            self._child.wait()

    def _why_it_ended(self) -> str:
        """Returns its own error, or what its exit status says."""
        if reason := last_error(self._log_file, self._log_start):
            return reason
        code = self._child.returncode if self._child is not None else 0
        if self._ending is not RestartReason.DIED:
            how = f"was not ready within {self._watchdog.patience.start_s:g} s (worker_start_s)"
        elif code == -signal.SIGKILL:
            how = "was killed by the system, probably because memory ran out"
        else:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"its worker {how}; its log is {self._log_file}"

    def _put_down(self, ending: RestartReason) -> None:
        log.error("the worker makes no progress; it is stopped", worker=self.name, pid=self._pid, why=str(ending))
        self._ending = ending
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


async def _pidfd_exit(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
