"""The client for threads, wherever it is called from: it works on an event loop of its own, in a thread of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from palestra.episodes import AsyncEpisodeClient, EpisodeClient
from tests.episodes.client.faults import Answer, FaultServer, Hang, claimed, lease, polite

RUNS = Answer(200, {"runs": []})


def test_an_interrupt_ends_a_call_at_once():
    with FaultServer(Hang()) as server, EpisodeClient(server.url) as client, ThreadPoolExecutor(1) as threads:

        def interrupt() -> float:
            server.wait_for("/claim")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return time.monotonic()

        interrupted = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.claim()
        assert time.monotonic() - interrupted.result() < 2


def test_it_may_be_called_where_a_loop_runs():
    async def scenario(client: EpisodeClient) -> object:
        return client.runs()

    with FaultServer(RUNS) as server, EpisodeClient(server.url) as client:
        assert asyncio.run(scenario(client)) == []


def test_one_client_serves_several_loops():
    with FaultServer(RUNS) as server:
        client = AsyncEpisodeClient(server.url)
        assert asyncio.run(client.runs()) == asyncio.run(client.runs()) == []
        assert server.connections == 1


def test_beats_go_on_while_a_player_blocks_its_loop():
    async def scenario(server: FaultServer) -> None:
        async with AsyncEpisodeClient(server.url) as client:
            (episode,) = await client.claim()
            server.wait_for("/heartbeat", 3)  # blocks
            assert episode.can_continue

    with FaultServer(claimed(lease(1, 0.15)), polite) as server:
        asyncio.run(scenario(server))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_connections_of_its_own():
    with FaultServer(RUNS) as server, EpisodeClient(server.url) as client:
        client.runs()
        child = multiprocessing.get_context("fork").Process(target=_call, args=(client, server.url))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert client.runs() == []
        assert [seen.connection for seen in server.requests] == [1, 2, 3, 1]


def _call(inherited: EpisodeClient, url: str) -> None:
    assert inherited.runs() == EpisodeClient(url).runs() == []


AT_EXIT = """
import atexit, sys
from palestra.episodes import EpisodeClient

client = EpisodeClient(sys.argv[1].replace("127.0.0.1", "localhost"))
atexit.register(client.close)
client.claim()
"""


def test_a_client_that_is_closed_when_the_program_ends_gives_back_what_it_holds():
    with FaultServer(Answer(**vars(claimed(lease(1))) | {"is_last": True}), polite) as server:
        command = [sys.executable, "-c", AT_EXIT, server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert server.requests[-1].path.endswith("/release")
        assert server.connections == 2  # its name was looked up once more
