"""Engine workers: started, watched, adopted, restarted.

Owns: the worker's process and its `Hello`. Never touches: models and requests, which its listener handles. Unlike
vLLM's servers (`vllm/replica`) and a gym's (`gym/supervisor/process_keeper`), which are asked for their health over
HTTP, a worker reports by itself, outlives the server, and is never given up, since its requests wait for it. All three
take their pauses from `util/backoff`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from palestra import __version__
from palestra.placement.process import NotPlaced
from palestra.server.core.background import Background
from palestra.server.core.workers.files import WorkerFiles
from palestra.server.core.workers.link import WorkerFrame, WorkerLink
from palestra.server.core.workers.link_security import LinkSecurity
from palestra.server.core.workers.watchdog import RestartReason, Watchdog, WatchdogTimeouts
from palestra.server.core.workers.worker_hosts import LocalHost, RunningWorker, WorkerHost
from palestra.store.write_failures import WriteFailures
from palestra.types.engine import (
    DropFiles,
    FilePart,
    GetFilePart,
    Hello,
    KeepFolder,
    ListFiles,
    ModelCard,
    Ping,
    Stop,
    WorkerConfig,
    WorkerHeartbeat,
)
from palestra.util.atomic_files import replacing
from palestra.util.backoff import Backoff
from palestra.util.json_types import JsonObject
from palestra.util.log_files import last_error, last_output, open_log

log = structlog.get_logger()

PING_S = 5.0  # a worker gives up after 30 s of silence
ADOPT_S = 30.0  # a living worker says Hello once it is loaded and its present computation is done
RESTARTS = Backoff(0.25, 10.0)
"""Pause before the next start: the first, and the longest one. It doubles while workers die before they are ready."""
STOP_S = 30.0
AT_ONCE = 32  # messages handled before others get their turn, even if thousands wait
RESPAWN_S = 2.0
FACTS_FILE = "worker.json"
"""What the next server needs to know of a running worker."""

FileMessage = ListFiles | GetFilePart | FilePart | KeepFolder | DropFiles


class WorkerError(Exception):
    """The worker cannot run; the message says why."""


def known_facts(folder: Path) -> JsonObject | None:
    """Returns what is known of the worker that was started last with this folder; None: it has ended in order."""
    try:
        return json.loads((folder / FACTS_FILE).read_text())
    except (OSError, ValueError):
        return None


class WorkerListener(Protocol):
    def on_hello(self, worker: WorkerSupervisor, hello: Hello) -> None: ...
    def on_hello_again(self, worker: WorkerSupervisor, hello: Hello) -> None: ...
    def on_message(self, worker: WorkerSupervisor, frame: WorkerFrame) -> None: ...
    def on_exit(self, worker: WorkerSupervisor, ending: RestartReason) -> None: ...


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """What a worker on another machine has beside those on this one."""

    host: WorkerHost
    security: LinkSecurity
    files: WorkerFiles


class WorkerSupervisor:
    def __init__(
        self,
        name: str,
        config: WorkerConfig,
        listener: WorkerListener,
        *,
        log_file: Path,
        patience: WatchdogTimeouts,
        write_wait_s: float,
        remote: RemoteWorker | None = None,
        host: LocalHost | None = None,
    ):
        """`remote`: of a worker that runs on another machine. `host`: with a process that has loaded the model."""
        self.name, self.config, self.listener = name, config, listener
        self.link = WorkerLink(config.address, None if remote is None else remote.security)
        self._host: WorkerHost = (host or LocalHost()) if remote is None else remote.host
        self._files = None if remote is None else remote.files
        self._file_work = Background()
        self.card: ModelCard | None = None
        self._log_file = log_file
        self._log_start = 0
        """Where the log of the present process begins."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._facts_file = self.folder / FACTS_FILE
        self._running: RunningWorker | None = None
        self._life = ""
        self.is_adopted = False
        """Whether it was started by an earlier server."""
        self._worker_id = ""
        self._hello = asyncio.Event()
        self._watchdog = Watchdog(patience, self._put_down)
        self._ending = RestartReason.DIED
        """Why the present process will have ended."""
        self._starts_fail = WriteFailures(write_wait_s)
        self.start_error: OSError | NotPlaced | None = None
        """Why the last start failed."""
        self.cannot_start = False
        """Whether starts have been failing for long."""
        self._stopping = False
        self._tasks: list[asyncio.Task] = []

    @property
    def folder(self) -> Path:
        """The worker's folder at the server."""
        return Path(self.config.state)

    @property
    def _plain_config(self) -> JsonObject:
        """Returns the config as it is read from a file: lists in place of tuples."""
        return msgspec.json.decode(msgspec.json.encode(self.config))

    @property
    def where(self) -> str:
        """The machine it is on; empty: this one, or none at present."""
        return "" if self._running is None else self._running.where

    async def start(self) -> None:
        """Returns when the worker is ready; raises WorkerError if it cannot start."""
        self._tasks.append(asyncio.create_task(self._listen(), name=f"listen {self.name}"))
        if not await self._adopt():
            try:
                await self._spawn()
            except NotPlaced as e:
                raise WorkerError(f"{self.config.model} cannot be served: {e}") from None
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
        known = known_facts(self.folder)
        self._running = None if known is None else await self._host.find(known, self._log_file)
        if self._running is not None:
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
        await self._host.close()
        self._facts_file.unlink(missing_ok=True)

    async def abandon(self) -> None:
        """Leaves the process running."""
        self._stopping = True
        self._watchdog.on_exit()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._file_work.settle_down()
        if self._running is not None:
            self._running.leave()
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
                    case WorkerHeartbeat(worker_id=worker_id) as beat:
                        if worker_id == self._worker_id and not self._stopping:
                            self._watchdog.on_beat(beat)
                    case ListFiles() | GetFilePart() | FilePart() | KeepFolder() | DropFiles() as message:
                        if not self._hello.is_set():
                            self._watchdog.on_spawn()  # a base model may take long to fetch: each file is progress
                        if self._files is not None:
                            self._file_work.run(self._serve_file(self._files, message, frame.sender))
                    case _:
                        self.listener.on_message(self, frame)
            except Exception:
                log.exception("a worker's message could not be handled", worker=self.name)

    async def _serve_file(self, files: WorkerFiles, message: FileMessage, sender: bytes) -> None:
        match message:
            case ListFiles() | GetFilePart():
                self.link.reply(sender, await files.answer(message))
            case FilePart():
                self.link.send(await files.store(message))
            case KeepFolder():
                self.link.send(await files.keep(message))
            case DropFiles():
                await files.drop(message)

    def _greet(self, hello: Hello) -> None:
        if hello.life != self._life:
            return  # a worker that was given up; it exits when it hears nothing
        if hello.worker_id == self._worker_id:
            self.link.send(Ping())
            self.listener.on_hello_again(self, hello)
            return
        self._worker_id, self.card = hello.worker_id, hello.card
        if self._files is not None:
            self._files.forget_incoming()
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
        known = known_facts(self.folder)
        if known is None:
            return False
        self._running = await self._host.find(known, self._log_file)
        if self._running is None:
            return False
        self._life, self.is_adopted = known.get("life", ""), True
        why = "it does not answer"
        if (known.get("version"), known.get("config")) != (__version__, self._plain_config):
            why = "it has another version or configuration"
        else:
            hello, exits = asyncio.create_task(self._hello.wait()), asyncio.create_task(self._exited())
            await asyncio.wait({hello, exits}, timeout=ADOPT_S, return_when=asyncio.FIRST_COMPLETED)
            hello.cancel()
            exits.cancel()
            if self._hello.is_set():
                log.info("adopted a running worker", worker=self.name, pid=self._pid, nodes=self.where)
                return True
        log.info("a running worker is replaced", worker=self.name, why=why)
        self._kill()
        await self._exited()
        return False

    async def _spawn(self) -> None:
        with open_log(self._log_file) as out:
            self._log_start = out.tell()
        life = self._life = uuid.uuid4().hex  # from now on, an earlier one is not listened to
        self._worker_id = ""
        running = await self._host.start(msgspec.structs.replace(self.config, life=life), self._log_file)
        try:
            facts = {**running.facts, "life": life, "version": __version__, "config": self._plain_config}
            with replacing(self._facts_file) as file:
                file.write(json.dumps(facts).encode())
        except BaseException:
            running.kill()
            raise
        self._running, self.is_adopted = running, False
        self._watchdog.on_spawn()

    async def _try_spawn(self) -> bool:
        """Starts a process; a full disk or process table, or a cluster without room, is no reason to give up for
        good."""
        try:
            await self._spawn()
        except (OSError, NotPlaced) as e:
            log.error("the worker could not be started; trying again", worker=self.name, error=str(e))
            self.start_error, self.cannot_start = e, self._starts_fail.failed()
            return False
        self._starts_fail.worked()
        self.start_error, self.cannot_start = None, False
        return True

    async def _watch(self, exits: asyncio.Task) -> None:
        """Restarts the worker whenever it has died."""
        pauses = RESTARTS.pauses()
        while True:
            moving = asyncio.create_task(self._move(), name=f"move {self.name}")
            try:
                await exits
            finally:
                moving.cancel()
            self._watchdog.on_exit()
            self.link.hang_up()
            was_ready, ending = self._hello.is_set(), self._ending
            self._hello.clear()
            self._ending = RestartReason.DIED
            if self._stopping:
                return
            output = last_output(self._log_file)
            log.warning("the worker ended", worker=self.name, pid=self._pid, ending=str(ending), last_output=output)
            self.listener.on_exit(self, ending)
            if was_ready:
                pauses = RESTARTS.pauses()
            await asyncio.sleep(next(pauses))
            while not await self._try_spawn():  # noqa: ASYNC110 - there is no event for room on a disk
                await asyncio.sleep(RESPAWN_S)
            exits = asyncio.create_task(self._exited())

    async def _move(self) -> None:
        """Ends the worker in order when its node is being emptied; it is started elsewhere."""
        await self._host.wait_until_draining()
        if self._running is not None and not self._stopping:
            log.info("the worker leaves its node, which is being drained", worker=self.name, nodes=self.where)
            self._ending = RestartReason.MOVED
            self._running.terminate()

    async def _exited(self) -> None:
        if self._running is not None:
            await self._running.wait()

    @property
    def _pid(self) -> int:
        return 0 if self._running is None else self._running.pid

    def _why_it_ended(self) -> str:
        """Returns its own error, or what its exit status says."""
        if reason := last_error(self._log_file, self._log_start):
            return reason
        code = (self._running.returncode if self._running is not None else None) or 0
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
        if self._running is not None:
            self._running.kill()
