"""A replica whose process the server starts, watches and restarts like that of a worker, on this machine or on a
node."""

from __future__ import annotations

from pathlib import Path

from palestra.server.core.workers.link import WorkerFrame
from palestra.server.core.workers.supervisor import RemoteWorker, WorkerSupervisor
from palestra.server.core.workers.watchdog import RestartReason, WatchdogTimeouts
from palestra.server.replicas.engine_replica import EngineReplica, ReplicaContext
from palestra.types.engine import Hello, ToWorker, WorkerConfig


class OwnReplica(EngineReplica):
    def __init__(
        self,
        number: int,
        context: ReplicaContext,
        config: WorkerConfig,
        *,
        log_file: Path,
        patience: WatchdogTimeouts,
        write_wait_s: float,
        remote: RemoteWorker | None = None,
    ):
        super().__init__(number, f"replica {number} of {context.model}", context)
        self.handle = WorkerSupervisor(
            self.where, config, self, log_file=log_file, patience=patience, write_wait_s=write_wait_s, remote=remote
        )

    async def start(self) -> None:
        await self.handle.start()

    async def stop(self) -> None:
        await super().stop()
        await self.handle.stop()

    def _send(self, message: ToWorker) -> None:
        self.handle.link.send(message)

    def on_hello(self, worker: WorkerSupervisor, hello: Hello) -> None:
        self.greet(hello)

    def on_hello_again(self, worker: WorkerSupervisor, hello: Hello) -> None:
        self.greet_again()

    def on_message(self, worker: WorkerSupervisor, frame: WorkerFrame) -> None:
        self.receive(frame.message)

    def on_exit(self, worker: WorkerSupervisor, ending: RestartReason) -> None:
        self.lose(f"{self.where} ended ({ending})")
