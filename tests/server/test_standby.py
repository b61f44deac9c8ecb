"""A server that stays up: another one, which shares nothing with it but PostgreSQL and object storage, goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from sqlalchemy import create_engine, func, make_url, select, text
from tinker import types

from palestra.store import Store
from palestra.store.queries.snapshot_copies import list_copies
from palestra.store.tables import models
from tests.server.conftest import KEY, Server
from tests.server.s3_server import BUCKET, s3_server
from tests.server.tcp_proxy import TcpProxy
from tests.server.test_faults import Run, assert_same_bits, batch, train, weights
from tests.store.conftest import new_database, postgres_server

__all__ = ["postgres_server"]

MakeServer = Callable[..., Any]
STANDS_BY = "Palestra stands by at "


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with new_database("postgresql", tmp_path, request) as url:
        yield url


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def pair(
    request: pytest.FixtureRequest, make_server: MakeServer, database: str, tmp_path: Path
) -> Iterator[tuple[Server, Server]]:
    """Two servers with state folders of their own, which share a folder or S3; neither is started."""
    with ExitStack() as stack:
        url, environment = f"file://{tmp_path}/shared", {}
        if request.param == "s3":
            s3 = stack.enter_context(s3_server())
            url, environment = f"s3://{BUCKET}/shared", s3.environment()
        shared = [
            *("models.0.snapshot_every_s=0.3", "journal=database", f"database={database}"),
            *(f"snapshots={url}/snapshots", f"checkpoints={url}/checkpoints"),
        ]
        made = [make_server(*shared, start=False, flags=("--standby",)) for _ in range(2)]
        for server in made:
            server.environment |= environment
        yield made[0], made[1]


def stand_by(server: Server) -> None:
    server.launch()
    server.until(lambda: STANDS_BY in server.said())
    server.url = server.said().partition(STANDS_BY)[2].split()[0]
    server.port = int(server.url.rpartition(":")[2])


def undisturbed(make_server: MakeServer) -> tuple[Run, dict[str, np.ndarray]]:
    calm = make_server()
    run = train(calm.client())
    return run, weights(calm, run)


def test_a_killed_server_is_followed_by_its_standby_at_the_same_bits(
    pair: tuple[Server, Server], make_server: MakeServer, database: str
) -> None:
    """Both processes of the active server die, twice: what was the active one first takes over again, with what it has
    on its disk from before. The journal alone would not do: it has forgotten what the copied snapshots cover."""
    expected = undisturbed(make_server)
    first, second = pair
    first.start()
    stand_by(second)
    assert second.http().get("/readyz").status_code == 503
    assert second.http().get("/healthz").status_code == 200
    answers: list[Any] = []
    moments = {2: (first, second), 5: (second, first)}
    pauses: list[float] = []

    with TcpProxy(first.port, second.port) as proxy:
        first.until(lambda: proxy.ready_port == first.port)
        client = tinker.ServiceClient(base_url=proxy.url, api_key=KEY)
        sampler = client.create_sampling_client(base_model=first.name)
        params = types.SamplingParams(max_tokens=40, seed=5)

        def disturb(step: int) -> None:
            if step not in moments:
                return
            active, standby = moments[step]
            answers.extend(sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params) for _ in range(5))
            active.until(lambda: covered(database) >= 3 * step)
            killed_at = time.monotonic()
            active.kill_both()
            standby.until(lambda: proxy.ready_port == standby.port)
            pauses.append(time.monotonic() - killed_at)
            if step != max(moments):
                stand_by(active)

        run = train(client, on_step=disturb)
    print(f"seconds from kill to ready: {pauses}")
    assert len({tuple(answer.result(timeout=200).sequences[0].tokens) for answer in answers}) == 1
    assert len(answers) == 10
    assert run.losses == expected[0].losses
    assert_same_bits(weights(first, run), expected[1])
    assert all("fetched snapshots of another server" in server.said() for server in pair)
    assert all("event=preloaded" in server.worker_log.read_text() for server in pair)
    assert first.stop() == 0


def covered(database: str) -> int:
    """The last request that left the journal because copies of snapshots have it."""
    with Store.open(database, lock=False) as store:
        return store.read_now(lambda c: c.execute(select(func.max(models.c.snapshot_seq))).scalar_one())


def copies(database: str) -> set[str]:
    """Kinds of the files that were copied."""
    with Store.open(database, lock=False) as store:
        return {copy.file.partition("/")[0] for copy in store.read_now(list_copies)}


@pytest.mark.slow
def test_kept_samplers_and_loaded_checkpoints_go_along(pair: tuple[Server, Server], database: str) -> None:
    """Of samplers whose model has moved on, of those of an unloaded model, and of a checkpoint that a replay loads."""
    first, second = pair
    first.overrides.append("models.0.snapshot_every_s=0.2")
    first.start()
    stand_by(second)
    prompt, params = types.ModelInput.from_ints([5, 6, 7, 8]), types.SamplingParams(max_tokens=8, temperature=0.0)

    with TcpProxy(first.port, second.port) as proxy:
        first.until(lambda: proxy.ready_port == first.port)
        client = tinker.ServiceClient(base_url=proxy.url, api_key=KEY)
        model = client.create_lora_training_client(base_model=first.name, rank=4, seed=1)
        old = model.save_weights_and_get_sampling_client()
        model.forward_backward(batch(0), "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-1)).result()
        saved = model.save_state("start").result().path
        first.until(lambda: copies(database) == {"models", "samplers"})
        loaded = client.create_training_client_from_state(saved)
        before = [
            old.sample(prompt, 1, params).result(timeout=60).sequences[0].tokens,
            loaded.forward(batch(1), "cross_entropy").result().metrics["loss:sum"],
        ]
        first.kill_both()
        after = [
            old.sample(prompt, 1, params).result(timeout=100).sequences[0].tokens,
            loaded.forward(batch(1), "cross_entropy").result(timeout=100).metrics["loss:sum"],
        ]
    assert before == after
    assert "lost" not in second.said()


@pytest.mark.slow
def test_a_server_that_loses_its_place_ends(pair: tuple[Server, Server], database: str) -> None:
    """Its connection is cut while it does not move, as by a network that was away, and it comes back too late."""
    first, second = pair
    first.start()
    model = first.client().create_lora_training_client(base_model=first.name, rank=4, seed=1)
    stand_by(second)
    url = make_url(database).set(drivername="postgresql+psycopg")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    holder = text("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted")
    os.kill(first.pid, signal.SIGSTOP)
    with engine.connect() as conn:
        pid = conn.execute(holder).scalar_one()
        conn.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    engine.dispose()
    second.wait_ready()
    os.kill(first.pid, signal.SIGCONT)
    assert first.process is not None
    first.until(lambda: first.process is not None and first.process.poll() is not None)
    assert first.process.poll() == 1
    assert "another server has taken over" in first.said()
    assert model.model_id in second.http().get("/api/v1/training_runs").text


def test_a_standby_that_is_stopped_ends_at_once(pair: tuple[Server, Server]) -> None:
    first, second = pair
    first.start()
    stand_by(second)
    assert second.stop() == 0
    assert first.http().get("/readyz").status_code == 200


@pytest.mark.slow
def test_a_standby_on_the_same_machine_goes_on_with_the_running_engine(make_server: MakeServer) -> None:
    """Both have one state folder, and SQLite in it: only the process of the server is replaced."""
    first = make_server(flags=("--standby",))
    second = make_server(start=False, flags=("--standby",))
    second.state = first.state
    model = first.client().create_lora_training_client(base_model=first.name, rank=4, seed=1)
    model.forward_backward(batch(0), "cross_entropy").result()
    stand_by(second)
    engine = first.worker_pid
    first.kill()
    second.wait_ready()
    assert second.worker_pid == engine
    assert "adopted a running worker" in second.said()
    assert model.model_id in second.http().get("/api/v1/training_runs").text
    assert second.stop() == 0
