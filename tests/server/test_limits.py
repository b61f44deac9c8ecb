"""Bounds: queues, memory, disk. Beyond them a client is asked to come back, or told in one line why not."""

from __future__ import annotations

import shutil
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tinker import types

from tests.server.raw import NAME, Raw, datum, datum_of, ok, real, refused, whole, wire
from tests.server.standstill import standstill

MAX_SAMPLES, MAX_TRAIN_BYTES, MAX_MODELS, KEEP_S = 4, 50_000, 8, 2.0
MakeServer = Callable[..., Any]


@pytest.fixture(scope="module")
def tight_server(make_module_server: MakeServer) -> Any:
    return make_module_server(
        f"limits.max_pending_samples={MAX_SAMPLES}",
        f"limits.max_pending_train_bytes={MAX_TRAIN_BYTES}",
        f"limits.max_models={MAX_MODELS}",
        "models.0.snapshot_every_s=0.3",
        keep_results_s=KEEP_S,
        poll_hold_s=1.0,
    )


@pytest.fixture
def api(tight_server: Any) -> Iterator[Raw]:
    api = Raw(tight_server)
    yield api
    for session in ok(api.get("sessions?limit=1000"))["sessions"]:
        api.post(f"sessions/{session}/finish", reason={"type": "success"})


def told_to_wait(answer: httpx.Response) -> None:
    assert answer.status_code == 429, answer.text
    assert 0 < float(answer.headers["retry-after"]) <= 60
    assert answer.json()["detail"]


def sdk_batch(tokens: int = 1000) -> list[types.Datum]:
    inputs: Any = {"target_tokens": [6] * tokens, "weights": [1.0] * tokens}
    return [types.Datum(model_input=types.ModelInput.from_ints([5] * tokens), loss_fn_inputs=inputs)]


# Queues


def test_samples_beyond_the_limit_are_told_to_wait(tight_server: Any, api: Raw) -> None:
    sampler = api.base_sampler()
    with standstill(tight_server):
        waiting = [ok(api.sample(sampler, i)) for i in range(MAX_SAMPLES)]
        told_to_wait(api.sample(sampler, MAX_SAMPLES))
        assert ok(api.sample(sampler, 0)) == waiting[0]  # one that is known already is not one more
        api.post("cancel_future", request_id=waiting[0]["request_id"])
        waiting.append(ok(api.sample(sampler, MAX_SAMPLES)))
    assert all(api.result(one)["sequences"] for one in waiting[1:])
    assert api.result(api.sample(sampler, MAX_SAMPLES + 1))["sequences"]


@pytest.mark.slow
def test_one_tenant_cannot_take_the_room_of_another(make_server: MakeServer) -> None:
    server = make_server(
        f"limits.max_pending_samples={MAX_SAMPLES}", "limits.max_pending_train_bytes=1000", start=False
    )
    alice, bob = (server.make_key(name) for name in ("alice", "bob"))
    server.start()
    hers, his = Raw(server, alice), Raw(server, bob)
    samplers, models = (hers.base_sampler(), his.base_sampler()), (hers.model(), his.model())
    with standstill(server):
        waiting = [ok(hers.sample(samplers[0], i)) for i in range(MAX_SAMPLES)]
        ok(models[0].send_pass(datum(length=100), seq_id=1))
        told_to_wait(hers.sample(samplers[0], MAX_SAMPLES))
        told_to_wait(models[0].step(seq_id=2))
        his_sample, his_step = ok(his.sample(samplers[1], 0)), ok(models[1].step(seq_id=1))
    assert all(hers.result(one)["sequences"] for one in waiting)
    assert his.result(his_sample)["sequences"]
    assert "metrics" in his.result(his_step)


def test_the_sdk_waits_for_room_to_sample_by_itself(tight_server: Any) -> None:
    client = tight_server.client()
    sampler = client.create_sampling_client(base_model=NAME)
    prompt, params = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=3)
    with standstill(tight_server):
        futures = [sampler.sample(prompt, 1, params) for _ in range(3 * MAX_SAMPLES)]
        tight_server.until(lambda: 'status="429"' in tight_server.metrics())
    assert all(len(future.result(timeout=60).sequences) == 1 for future in futures)
    client.close("success").result()


def test_training_data_beyond_the_limit_is_told_to_wait(tight_server: Any, api: Raw) -> None:
    model = api.model()
    large = datum(length=1000)
    with standstill(tight_server):
        waiting = [ok(model.send_pass(*[large] * 2, seq_id=i)) for i in (1, 2)]
        told_to_wait(model.send_pass(large, seq_id=3))
        told_to_wait(model.step(seq_id=3))
        assert ok(model.send_pass(*[large] * 2, seq_id=1)) == waiting[0]
    assert all("metrics" in api.result(one) for one in waiting)
    assert "metrics" in api.result(model.step(seq_id=3))


def test_the_sdk_waits_for_room_to_train_by_itself(tight_server: Any) -> None:
    client = tight_server.client()
    model = client.create_lora_training_client(base_model=NAME, rank=4)
    batch = sdk_batch()
    futures = []

    def send() -> None:
        futures.extend(model.forward_backward(batch, "cross_entropy") for _ in range(4))

    with standstill(tight_server):
        sender = threading.Thread(target=send)
        sender.start()
        time.sleep(1.0)
    sender.join()
    losses = [future.result(timeout=60).metrics["loss:sum"] for future in futures]
    assert losses == pytest.approx([losses[0]] * 4)
    model.optim_step(types.AdamParams()).result(timeout=60)
    client.close("success").result()


def test_models_beyond_the_limit_are_told_to_wait(api: Raw) -> None:
    session, other = api.session(), api.session()
    for i in range(MAX_MODELS - 1):
        ok(api.create(session, i))
    last = api.model(other)
    told_to_wait(api.create(session, MAX_MODELS))
    ok(api.create(session, 0))  # one that is there already is not one more
    last.works()
    api.post(f"sessions/{other}/finish", reason={"type": "success"})
    assert "model_id" in api.result(api.create(session, MAX_MODELS))


# Time


def test_results_are_kept_for_the_configured_time(tight_server: Any, api: Raw) -> None:
    model = api.model()
    trained, sampled = ok(model.send_pass()), ok(api.sample(api.base_sampler()))
    assert "metrics" in api.result(trained)
    assert "metrics" in api.result(trained)
    unread = ok(model.step())
    tight_server.until(lambda: api.retrieve(trained["request_id"]).status_code == 404)
    tight_server.until(lambda: api.retrieve(unread["request_id"]).status_code == 404)
    tight_server.until(lambda: api.retrieve(sampled["request_id"]).status_code == 410)
    refused(model.send_pass(seq_id=1), said="too late")  # and never runs twice
    model.works()


# Disk


def journal_files(server: Any) -> list[Path]:
    return [f for f in (server.state / "journal").rglob("*") if f.is_file()]


@pytest.mark.slow
def test_journal_and_database_do_not_grow_without_bound(make_server: MakeServer) -> None:
    """400 MB of requests, among them refused ones, whose numbers are noted; segments have 64 MB."""
    server = make_server("models.0.snapshot_every_s=0.3", keep_results_s=1)
    api = Raw(server)
    model = api.model()
    bulk = datum_of([5, 6], {"target_tokens": whole(6, 7), "surprise": real(*[0.0] * 500_000)})
    most, database = 0, 0
    for step in range(200):
        assert "error" in api.result(model.send_pass(bulk))
        model.works()
        refused(model.send("save_weights", path="../x"))
        most = max(most, len(journal_files(server)))
        if step == 100:
            database = _rows(server)
    assert most <= 4, f"{most} segments"
    server.until(lambda: sum(f.stat().st_size for f in journal_files(server)) < 140 << 20, timeout_s=15)
    assert _rows(server) == database
    server.restart()
    model.works()
    assert server.stop() == 0


def _rows(server: Any) -> int:
    with sqlite3.connect(server.state / "palestra.db") as db:
        tables = [name for (name,) in db.execute("select name from sqlite_master where type = 'table'")]
        return sum(db.execute(f"select count(*) from {table}").fetchone()[0] for table in tables)


@pytest.mark.slow
def test_five_hundred_kept_samplers_take_the_memory_of_a_few(make_server: MakeServer) -> None:
    server = make_server("models.0.sampler_memory_bytes=4000000")
    api = Raw(server)
    model = api.model(rank=32)
    worker = psutil.Process(server.worker_pid)

    def keep(i: int) -> str:
        api.result(model.send_pass(datum(seed=i)))
        api.result(model.step(1e-3))
        return api.result(model.keep(i))["sampling_session_id"]

    samplers = [keep(i) for i in range(100)]
    first = {i: api.result(_greedy(api, samplers[i], 0)) for i in (0, 50, 99)}
    before = worker.memory_full_info().pss
    samplers += [keep(i) for i in range(100, 500)]
    after = worker.memory_full_info().pss
    assert after - before < 20 << 20, f"{(after - before) >> 20} MiB more for 400 samplers"
    for i, sampled in first.items():  # spilled, and the same when they come back
        assert api.result(_greedy(api, samplers[i], 1))["sequences"][0]["tokens"] == sampled["sequences"][0]["tokens"]
    assert len({tuple(api.result(_greedy(api, s, 2))["sequences"][0]["logprobs"]) for s in samplers[::100]}) == 5
    api.post(f"sessions/{model.session_id}/finish", reason={"type": "success"})
    server.until(lambda: not list((server.state / "worker-Qwen_Qwen3-8B").rglob("*.sampler")))


def _greedy(api: Raw, sampler: str, number: int) -> httpx.Response:
    return api.sample(sampler, number, sampling_params={"max_tokens": 6, "temperature": 0.0, "stop": []})


# Starting and stopping


def one_line(server: Any, *said: str, code: int = 1) -> None:
    """It ends with this status and says why in one line, without a trace."""
    server.launch()
    assert server.process.wait(60) == code, server.tail()
    lines = [line for line in server.said().splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].lower().startswith("error"), lines
    for word in said:
        assert word in lines[0], lines


def test_a_second_server_on_one_state_is_told(tight_server: Any, make_server: MakeServer) -> None:
    second = make_server(start=False)
    second.state = tight_server.state
    one_line(second, str(tight_server.state))
    ok(Raw(tight_server).get("sessions"))
    second.state = second.folder / "state"  # what runs there is not this one's to end


def test_a_port_in_use_is_told(tight_server: Any, make_server: MakeServer) -> None:
    server = make_server(start=False)
    server.port = tight_server.port
    one_line(server, str(tight_server.port), "--port")


def test_weights_that_cannot_be_read_are_told(make_server: MakeServer, tmp_path: Path, micro_model: Path) -> None:
    torn = shutil.copytree(micro_model, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"not weights")
    one_line(make_server(start=False, model=torn), "model.safetensors")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_server_stops_under_load_and_leaves_nothing(make_server: MakeServer, number: int) -> None:
    """Passes and samples under way, polls held, another client sending all the time."""
    server = make_server()
    api = Raw(server)
    model, sampler = api.model(), api.base_sampler()
    waiting = [ok(model.send_pass(datum(length=1000)))["request_id"] for _ in range(20)]
    waiting += [
        ok(api.sample(sampler, i, sampling_params={"max_tokens": 4000, "stop": []}))["request_id"] for i in range(20)
    ]
    statuses: list[int] = []
    threads = [threading.Thread(target=_poll, args=(server, request, statuses)) for request in waiting[::4]]
    threads.append(threading.Thread(target=_send_until_closed, args=(server, model.model_id, statuses)))
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert server.stop(number) == 0  # and checks that no process is left
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert set(statuses) <= {200, 408, 503}, statuses  # all of them are tried again, none is final
    assert "Traceback" not in server.log.read_text()
    if number == signal.SIGINT:  # what was acknowledged goes on
        server.start()
        assert "metrics" in Raw(server).result(waiting[19])
        assert server.stop() == 0


def _poll(server: Any, request_id: str, statuses: list[int]) -> None:
    try:
        with httpx.Client(base_url=server.url, timeout=60.0, verify=False, trust_env=False) as http:
            answer = http.post("/api/v1/retrieve_future", json={"request_id": request_id})
            statuses.append(answer.status_code)
    except httpx.TransportError:
        pass


def _send_until_closed(server: Any, model_id: str, statuses: list[int]) -> None:
    from tests.server.raw import PROTOBUF

    with httpx.Client(base_url=server.url, timeout=60.0, verify=False, trust_env=False) as http:
        for seq_id in range(21, 100_000):
            message = wire.ForwardBackwardRequest(
                model_id=model_id, seq_id=seq_id, data=[datum()], loss_fn="cross_entropy"
            )
            try:
                answer = http.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=PROTOBUF)
            except httpx.TransportError:
                return
            statuses.append(answer.status_code)
            if answer.status_code != 200:
                return


def test_a_server_stopped_while_it_starts_leaves_nothing(make_server: MakeServer) -> None:
    server = make_server(start=False)
    server.launch()
    server.until((server.state / "worker-Qwen_Qwen3-8B" / "worker.json").exists)
    assert server.stop(signal.SIGINT) == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port or 1)) != 0
