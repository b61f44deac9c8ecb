"""The process itself: its loop, its line to the server, its ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from palestra.engine.stats import StatsClock
from palestra.engine.time_share import TimeShare, Work
from palestra.types.engine import Ping, WorkerConfig
from tests.warm_start import start_engine


def test_samples_are_answered_while_a_long_pass_runs(drivers: Callable[..., Any]) -> None:
    driver = drivers(micro_batch_tokens=256, beat_every_s=0.05)
    driver.start()
    driver.create("a")
    long = driver.train("a", driver.a_pass(800))
    for _ in range(5):  # one after another: each has its turns between those of the pass
        driver.answer(driver.sample(max_tokens=4))
    assert long not in driver.results
    many = [driver.sample(n=8, max_tokens=50) for _ in range(4)]
    for name in many:
        driver.answer(name)
    assert len(driver.result(long).outputs) == 800
    driver.until(lambda: driver.stats[-1].tokens_sampled >= 4 * 8 * 50)
    assert min(driver.stats[-1].train_s, driver.stats[-1].sample_s) > 0
    assert {"training", "sampling"} <= {b.doing for b in driver.beats}
    assert max(b.busy_s for b in driver.beats) < 5  # of one quantum, however long the pass


def test_an_idle_worker_sleeps_and_leaves_when_nobody_is_left(drivers: Callable[..., Any]) -> None:
    driver = drivers(server_timeout_s=3.0, beat_every_s=0.5)
    driver.start()
    driver.create("a")
    for bad in ([b"other epoch", b"\xc1"], [driver.epoch, b"\xc1nonsense"], [driver.epoch, b"a", b"b"]):
        driver.socket.send_multipart([driver.peer, *bad])
    driver.answer(driver.sample())  # it has survived those
    assert driver.process is not None
    process = psutil.Process(driver.process.pid)
    driver.until(lambda: any(s.models == 1 and s.queued_train == 0 for s in driver.stats))
    before, beats = process.cpu_times(), len(driver.beats)
    for _ in range(2):
        until = time.monotonic() + 1.0
        while (left_s := until - time.monotonic()) > 0:  # beats come between
            driver.pump(left_s)
        driver.send(Ping())
    after = process.cpu_times()
    assert (after.user - before.user) + (after.system - before.system) <= 0.02
    assert 2 <= len(driver.beats) - beats <= 6
    assert {(b.pid, b.doing, b.busy_s) for b in driver.beats[beats:]} == {(process.pid, "", 0.0)}
    start = time.monotonic()
    assert driver.wait_exit() == 0
    assert time.monotonic() - start > 1.5
    assert Path(driver.config.state, "models", "a.snapshot").is_file()


def test_hello_is_repeated_until_welcome_and_a_signal_stops(drivers: Callable[..., Any]) -> None:
    driver = drivers(snapshot_every_s=1000.0)
    driver.start()
    driver.create("a")
    first, driver.peer = driver.peer, b""
    driver.die()
    driver.open()
    driver.until(lambda: len(driver.hellos) >= 3)
    assert {h.worker_id.encode() for h in driver.hellos} == {first}
    driver.peer = first
    assert driver.process is not None
    driver.process.send_signal(signal.SIGINT)  # meant for the server
    driver.welcome()
    assert not driver.answer(driver.sample()).prompt_logprobs
    driver.process.send_signal(signal.SIGTERM)
    assert driver.wait_exit() == 0
    assert driver.snapshots == {"a": 0}


def test_a_worker_without_settings_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "palestra.engine"],
        env=os.environ | {"PALESTRA_WORKER": '{"address": 3}'},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "PALESTRA_WORKER" in done.stderr


def test_a_worker_without_a_model_says_so_in_one_line(tmp_path: Path) -> None:
    config = WorkerConfig(address="ipc:///tmp/nobody", model=str(tmp_path / "no-model"), state=str(tmp_path / "state"))
    variables = os.environ | {"PALESTRA_WORKER": msgspec.json.encode(config).decode(), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "worker.log").open("wb") as out:
        process = start_engine(output=out, env=variables)
    assert process.wait(60) == 2
    said = (tmp_path / "worker.log").read_text()
    assert said.count("\n") == 1
    assert "no-model" in said


@pytest.mark.slow
def test_one_worker_a_state_folder(drivers: Callable[..., Any]) -> None:
    driver = drivers()
    driver.start()
    config = msgspec.json.encode(driver.config).decode()
    done = subprocess.run(
        [sys.executable, "-m", "palestra.engine"],
        env=os.environ | {"PALESTRA_WORKER": config},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "another worker" in done.stderr


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_time_is_shared_while_both_have_work(share: float) -> None:
    account = TimeShare(share)
    spent = dict.fromkeys(Work, 0.0)
    for i in range(4000):
        work = account.next(train=True, sample=True)
        seconds = 0.03 if work is Work.SAMPLE else 0.01 + 0.02 * (i % 3)
        account.charge(work, seconds)
        spent[work] += seconds
    assert spent[Work.SAMPLE] / sum(spent.values()) == pytest.approx(min(max(share, 0.02), 0.98), abs=0.02)


def test_sampling_goes_first_and_idle_time_is_no_credit() -> None:
    account = TimeShare(0.5)
    assert account.next(train=False, sample=False) is None
    for _ in range(100):
        assert account.next(train=True, sample=False) is Work.TRAIN
        account.charge(Work.TRAIN, 1.0)
    turns = []
    for _ in range(4):
        work = account.next(train=True, sample=True)
        account.charge(work, 1.0)
        turns.append(work)
    assert turns[0] is Work.SAMPLE
    assert turns.count(Work.SAMPLE) <= 3  # one more, for the quantum it waited


def test_stats_are_said_while_there_is_work_and_once_after() -> None:
    clock = StatsClock()
    assert [clock.is_due(worked=w, has_work=w) for w in (False, True, True, False, False)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert StatsClock().is_due(worked=True, has_work=False)
