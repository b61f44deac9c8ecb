"""Agent Lightning's store under the load of the benchmark of episodes: rollouts enqueued, dequeued and ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from peers.episode_load import TASK, AnyLoad, AnyPlayer, Connection
from peers.tinker_server import Processes, ServerError

API = "/v1/agl"
START_S = 120.0  # it looks for a list of prices on the internet first
STOP_S = 10.0
AT_ONCE = 1000
ROLLOUT = '{"input":' + TASK + "}"
END = '{"status":"succeeded"}'


class _Attempt(msgspec.Struct):
    attempt_id: str


class _Rollout(msgspec.Struct):
    rollout_id: str
    attempt: _Attempt


_rollouts = msgspec.json.Decoder(list[_Rollout])


@dataclass(slots=True)
class LightningLoad(AnyLoad[_Rollout]):
    """What was played is kept: it has no way to forget."""

    _queued: int = 0

    def queue(self, count: int) -> None:
        asyncio.run(self._queue(count))

    def player(self, client_id: str, connection: Connection) -> AnyPlayer[_Rollout]:
        return _Player(client_id, connection)

    async def _queue(self, count: int) -> None:
        connection = await self.connect()
        player = _Player("", connection)
        while (missing := count - self._queued) > 0:
            await player.register(min(missing, AT_ONCE))
            self._queued += min(missing, AT_ONCE)
        connection.close()


@dataclass(slots=True)
class _Player(AnyPlayer[_Rollout]):
    async def register(self, count: int) -> None:
        body = f'{{"rollouts":[{",".join([ROLLOUT] * count)}]}}'
        await self.connection.ask("POST", f"{API}/queues/rollouts/enqueue", body)

    async def claim(self, count: int) -> list[_Rollout]:
        body = f'{{"limit":{count},"worker_id":"{self.client_id}"}}'
        return _rollouts.decode(await self.connection.ask("POST", f"{API}/queues/rollouts/dequeue", body))

    async def end(self, claimed: Sequence[_Rollout]) -> None:
        """One by one: there is no call for several."""
        for one in claimed:
            path = f"{API}/rollouts/{one.rollout_id}/attempts/{one.attempt.attempt_id}"
            await self.connection.ask("POST", path, END)


@contextlib.contextmanager
def lightning_server(command: Path) -> Iterator[tuple[str, Processes]]:
    """Its URL when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [str(command), "store", "--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(process, url)
        yield url, Processes(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _await_health(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}{API}/health", timeout=5):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServerError(f"agl store did not answer ({process.poll()})")
        time.sleep(0.2)
