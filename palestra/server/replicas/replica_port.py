"""The port at which replicas elsewhere join: one ZeroMQ socket, encrypted by CURVE, for all of them.

Any process that has the server's public key may connect; only a `Hello` with a ticket that the server has signed is
answered, and only replicas that said it are listened to. Tickets and the key stay valid when the server is restarted,
so replicas come back by themselves, as long as the key is valid that they joined with.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Callable

import msgspec
import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from palestra.server.core.workers.supervisor import PING_S
from palestra.server.core.workers.watchdog import RestartReason, Watchdog, WatchdogTimeouts
from palestra.server.replicas.engine_replica import EngineReplica, ReplicaContext
from palestra.server.replicas.engine_runner import EngineRunner
from palestra.types.engine import (
    FromWorker,
    Hello,
    Ping,
    ReplicaTicket,
    Stop,
    ToWorker,
    Welcome,
    WorkerHeartbeat,
    decode_from_worker,
    encode_message,
)

log = structlog.get_logger()

LIVENESS_MS = 5000
MAX_MESSAGE_BYTES = 256 << 20  # far more than the largest sample
LOOK_AGAIN_S = (0.0, 0.2, 1.0)  # after a connection has ended: the socket learns it a moment later than we


class RemoteReplica(EngineReplica):
    """A replica whose process the server does not start."""

    def __init__(
        self, number: int, context: ReplicaContext, port: ReplicaPort, hello: Hello, patience: WatchdogTimeouts
    ):
        assert hello.ticket is not None
        super().__init__(number, f"replica {hello.ticket.replica_id} of {context.model}", context)
        self._port, self.worker_id, self.key_id = port, hello.worker_id, hello.ticket.key_id
        self.epoch = secrets.token_hex(8)
        self.watchdog = Watchdog(patience, self._give_up)
        self.watchdog.on_hello()

    def _send(self, message: ToWorker) -> None:
        self._port.send(self, message)

    def _give_up(self, reason: RestartReason) -> None:
        self._port.part_from(self, f"{self.where} does not answer ({reason})")

    def _dismiss_if_idle(self) -> None:
        if self._is_leaving and not self._running:
            self._send(Stop())
            self._port.part_from(self, f"{self.where} has left")


class ReplicaPort:
    def __init__(
        self,
        secret: str,
        find: Callable[[str], EngineRunner | None],
        patience: WatchdogTimeouts,
        is_valid_key: Callable[[int], bool],
    ):
        """`find` returns the runner of a base model, if replicas may join it."""
        self._secret, self._find, self._patience, self._is_valid_key = secret.encode(), find, patience, is_valid_key
        self._key = z85.encode(self._digest(b"palestra replica port"))
        self.public_key = zmq.curve_public(self._key).decode()
        self._replicas: dict[str, tuple[RemoteReplica, EngineRunner]] = {}
        """Those that are connected, by the id of their process."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 500),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.ROUTER_MANDATORY, 1),  # sending to one that is gone is an error
            (zmq.HEARTBEAT_IVL, LIVENESS_MS),
            (zmq.HEARTBEAT_TIMEOUT, 3 * LIVENESS_MS),
            (zmq.IPV6, 1),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        ):
            self._socket.setsockopt(option, value)
        self._socket.curve_secretkey, self._socket.curve_server = self._key, True
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._arrived = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, host: str, port: int) -> None:
        """Raises OSError if the port is taken."""
        host = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as e:
            raise OSError(e.errno, str(e)) from None
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.FD, self._look)
        loop.add_reader(self._monitor.FD, self._on_disconnect)
        self._tasks = [
            asyncio.create_task(self._listen(), name="replica port"),
            asyncio.create_task(self._ping_often(), name="ping replicas"),
        ]

    async def close(self) -> None:
        for replica, _ in list(self._replicas.values()):
            self.part_from(replica, "the server is being stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket.FD)
            loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()

    # Tickets

    def ticket(self, base_model: str, key_id: int) -> ReplicaTicket:
        replica_id = secrets.token_hex(4)
        signature = self._signature(replica_id, base_model, key_id)
        return ReplicaTicket(replica_id=replica_id, base_model=base_model, signature=signature, key_id=key_id)

    def _is_valid(self, ticket: ReplicaTicket) -> bool:
        signature = self._signature(ticket.replica_id, ticket.base_model, ticket.key_id)
        return hmac.compare_digest(signature.encode(), ticket.signature.encode())

    def _signature(self, replica_id: str, base_model: str, key_id: int) -> str:
        return self._digest(msgspec.json.encode(["palestra replica", replica_id, base_model, key_id])).hex()

    def _digest(self, of: bytes) -> bytes:
        return hmac.digest(self._secret, of, hashlib.sha256)

    # Sending

    def send(self, replica: RemoteReplica, message: ToWorker) -> None:
        """Sends a message; one that is gone is noticed here."""
        frames = [replica.worker_id.encode(), replica.epoch.encode(), encode_message(message)]
        try:
            self._socket.send_multipart(frames, copy=len(frames[-1]) < 65536)
        except zmq.ZMQError as e:
            asyncio.get_running_loop().call_soon(
                self.part_from, replica, f"the connection to {replica.where} has ended ({e.strerror})"
            )
        self._look()

    async def _ping_often(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self._ping()

    def _ping(self) -> None:
        for replica, _ in list(self._replicas.values()):
            self.send(replica, Ping())

    def _on_disconnect(self) -> None:
        """A connection has ended; whose, is seen by sending to all."""
        with contextlib.suppress(zmq.Again):
            while True:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
        loop = asyncio.get_running_loop()
        for wait_s in LOOK_AGAIN_S:
            loop.call_later(wait_s, self._ping)

    def end_keys(self, key_ids: set[int]) -> None:
        """Ends the replicas that joined with these keys."""
        for replica, _ in list(self._replicas.values()):
            if replica.key_id in key_ids:
                self.send(replica, Stop())
                self.part_from(replica, f"the key that {replica.where} joined with is no longer valid")

    def part_from(self, replica: RemoteReplica, why: str) -> None:
        """Parts from a replica that has left or is lost; its samples go elsewhere."""
        replica.watchdog.on_exit()
        known = self._replicas.pop(replica.worker_id, None)
        if known is not None:
            replica.lose(why)
            known[1].replicas.remove(replica)
            log.info("a replica is gone", replica=replica.where, why=why)

    # Receiving

    def _look(self) -> None:
        """The descriptor signals once for all messages that wait, and sending clears the signal."""
        if not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._arrived.set()

    async def _listen(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            try:
                peer, epoch, frame = frames
                self._receive(peer.decode(errors="replace"), epoch, decode_from_worker(frame))
            except (ValueError, msgspec.MsgspecError):
                log.warning("a message at the replica port is malformed")
            except Exception:
                log.exception("a replica's message could not be handled")

    def _receive(self, peer: str, epoch: bytes, message: FromWorker) -> None:
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif isinstance(message, WorkerHeartbeat):
            if (known := self._replicas.get(message.worker_id)) is not None:
                known[0].watchdog.on_beat(message)
        elif (known := self._replicas.get(peer)) is not None and epoch == known[0].epoch.encode():
            known[0].receive(message)

    def _greet(self, peer: str, hello: Hello) -> None:
        ticket = hello.ticket
        if ticket is None or peer != hello.worker_id or not self._is_valid(ticket):
            log.warning("a replica without a valid ticket is ignored")
            return
        if (known := self._replicas.get(hello.worker_id)) is not None:
            self.send(known[0], Ping())
            known[0].greet_again()
            return
        if ticket.key_id and not self._is_valid_key(ticket.key_id):
            log.warning("a replica is ended: its key is no longer valid", key_id=ticket.key_id)
            epoch = secrets.token_hex(8)
            for message in (Welcome(epoch=epoch), Stop()):
                self._socket.send_multipart([peer.encode(), epoch.encode(), encode_message(message)])
            return
        runner = self._find(ticket.base_model)
        if runner is None:
            log.warning("a replica is ignored: its model takes none now", model=ticket.base_model)
            return
        replica = runner.add_remote(
            ticket.replica_id, lambda number, context: RemoteReplica(number, context, self, hello, self._patience)
        )
        self._replicas[hello.worker_id] = replica, runner
        self.send(replica, Welcome(epoch=replica.epoch))
        replica.greet(hello)
