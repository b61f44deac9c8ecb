"""A worker that lives and does not work is ended and replaced; one that is merely busy, or slept with us, is not."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from palestra.server.core.workers.watchdog import LOOKS, RestartReason, Watchdog, WatchdogTimeouts
from palestra.types.engine import WorkerHeartbeat
from tests.server.test_faults import batch
from tests.waiting import PATIENCE_S

MakeServer = Callable[..., Any]
PROMPT = types.ModelInput.from_ints([5, 6, 7])


def once(folder: Path, what: str) -> str:
    """Code for the worker that happens in one of its lives only."""
    return f"""
        mark = {str(folder / "happened")!r}
        def happens_now():
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            return True
        {what}
    """


def test_a_stopped_worker_is_replaced_and_nothing_is_lost(make_server: MakeServer) -> None:
    server = make_server(worker_silence_s=1.5)
    client = server.client()
    model = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=1)
    sampler = client.create_sampling_client(base_model="Qwen/Qwen3-8B")
    passes = [model.forward_backward(batch(i), "cross_entropy") for i in range(4)]
    samples = [sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=50)) for _ in range(20)]
    stopped = server.worker_pid
    os.kill(stopped, signal.SIGSTOP)
    passes += [model.forward_backward(batch(i), "cross_entropy") for i in range(4, 6)]
    assert all(p.result(timeout=60).metrics["loss:sum"] > 0 for p in passes)
    assert all(len(s.result(timeout=60).sequences) == 1 for s in samples)
    assert server.worker_pid != stopped
    assert 'reason="silent"} 1.0' in server.metrics()
    assert server.stop() == 0


@pytest.mark.slow
def test_a_loop_that_spins_for_ever_is_ended(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server("worker_silence_s=1.5", "worker_stall_s=2", start=False)
    server.sabotage(
        once(
            tmp_path,
            """
        from palestra.engine.torch_backend import TorchBackend
        plan = TorchBackend.plan
        def spin(self, model, request):
            while happens_now() or hasattr(self, "spins"):
                self.spins = True
            return plan(self, model, request)
        TorchBackend.plan = spin
    """,
        )
    )
    server.start()
    model = server.client().create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=1)
    assert model.forward_backward(batch(0), "cross_entropy").result(timeout=60).metrics["loss:sum"] > 0
    assert 'reason="stuck"} 1.0' in server.metrics()
    assert "is stuck" in server.said()
    assert "doing=training" in server.said()


@pytest.mark.slow
def test_a_restarted_worker_that_is_never_ready_is_ended(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(worker_start_s=6.0)
    model = server.client().create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=1)
    server.stop()
    server.sabotage(
        once(tmp_path, "import time\n        if os.path.exists(mark + '-on') and happens_now(): time.sleep(1000)")
    )
    server.start()
    (tmp_path / "happened-on").touch()
    server.kill_worker()
    assert model.forward_backward(batch(0), "cross_entropy").result(timeout=100).metrics["loss:sum"] > 0
    assert 'reason="not_ready"} 1.0' in server.metrics()
    assert 'reason="died"} 1.0' in server.metrics()


@pytest.mark.slow
def test_a_machine_that_slept_wakes_up_with_the_same_worker(make_server: MakeServer) -> None:
    """Both processes stop for longer than a silent worker has, and the server is the first to wake up."""
    server = make_server(worker_silence_s=2.0)
    worker = server.worker_pid
    for _ in range(3):
        for pid in (server.pid, worker):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(server.pid, signal.SIGCONT)
        time.sleep(0.3)
        os.kill(worker, signal.SIGCONT)
        time.sleep(1.0)
    assert server.worker_pid == worker
    assert "palestra_worker_restarts_total{" not in server.metrics()


# The timers alone

BITES = WatchdogTimeouts(start_s=0.2, silence_s=0.3, stall_s=5.0)


def bites(
    patience: WatchdogTimeouts, live: Callable[[Watchdog], Any], *, does_bite: bool = False
) -> list[RestartReason]:
    async def run() -> list[RestartReason]:
        bitten: list[RestartReason] = []
        has_bitten = asyncio.Event()

        def bite(reason: RestartReason) -> None:
            bitten.append(reason)
            has_bitten.set()

        watchdog = Watchdog(patience, bite)
        await live(watchdog)
        if does_bite:
            await asyncio.wait_for(has_bitten.wait(), PATIENCE_S)
        watchdog.on_exit()
        return bitten

    return asyncio.run(run())


async def never_ready(watchdog: Watchdog) -> None:
    watchdog.on_spawn()
    await asyncio.sleep(0.3)


async def silent(watchdog: Watchdog) -> None:
    watchdog.on_hello()
    watchdog.on_beat(WorkerHeartbeat(pid=1))
    await asyncio.sleep(0.5)


async def stuck(watchdog: Watchdog) -> None:
    watchdog.on_hello()
    for busy_s in (4.0, 6.0, 7.0, 8.0):
        watchdog.on_beat(WorkerHeartbeat(pid=1, doing="training", busy_s=busy_s))


async def busy(watchdog: Watchdog) -> None:
    watchdog.on_hello()
    for busy_s in (0.1, 4.9, 600.0, 0.1, 600.0):  # single ones: as after a sleep in the middle of a computation
        watchdog.on_beat(WorkerHeartbeat(pid=1, doing="training", busy_s=busy_s))
        await asyncio.sleep(0.1)


async def blocked(watchdog: Watchdog) -> None:
    """The server's own loop stands still: the beats of that time are waiting behind the timer."""
    watchdog.on_hello()
    await asyncio.sleep(0.05)
    time.sleep(1.0)  # noqa: ASYNC251 - that is the point
    await asyncio.sleep(0.05)
    watchdog.on_beat(WorkerHeartbeat(pid=1))
    await asyncio.sleep(0.1)


async def gone(watchdog: Watchdog) -> None:
    watchdog.on_spawn()
    watchdog.on_hello()
    watchdog.on_exit()
    await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    ("live", "ends"),
    [
        (never_ready, [RestartReason.NOT_READY]),
        (silent, [RestartReason.SILENT]),
        (stuck, [RestartReason.STUCK]),
        (busy, []),
        (blocked, []),
        (gone, []),
    ],
)
def test_only_what_does_not_work_is_bitten_and_once(live: Callable[[Watchdog], Any], ends: list[RestartReason]) -> None:
    assert LOOKS > 1
    assert bites(BITES, live, does_bite=bool(ends)) == ends


@pytest.mark.parametrize("live", [never_ready, silent, stuck])
def test_zero_waits_for_ever(live: Callable[[Watchdog], Any]) -> None:
    assert bites(WatchdogTimeouts(start_s=0, silence_s=0, stall_s=0), live) == []
