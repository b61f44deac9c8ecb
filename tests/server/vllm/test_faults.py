"""vLLM breaks, is started wrongly, or cannot do what is asked: samples come anyway, or the reason does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import tinker
from tinker import types

from tests.server.vllm.conftest import COMPILED, MODEL, START_S, Served, Vllm
from tests.server.vllm.wires import Wire

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

PROMPT = types.ModelInput.from_ints([39, 422, 100, 300, 18])
LONG = 1500  # tokens: some seconds


def begin(sampler: tinker.SamplingClient, tokens: int = LONG) -> Any:
    expected = types.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])
    return sampler.sample(PROMPT, num_samples=1, sampling_params=expected)


# Servers elsewhere


@pytest.fixture(scope="module")
def wires(vllms: tuple[Vllm, Vllm]) -> Iterator[list[Wire]]:
    wires = [Wire(vllm.url) for vllm in vllms]
    yield wires
    for wire in wires:
        wire.cut()


@pytest.fixture(scope="module")
def wired(
    tmp_path_factory: pytest.TempPathFactory, wires: list[Wire], vllms: tuple[Vllm, Vllm], ports: tuple[int, ...]
) -> Iterator[Served]:
    before = [vllm.adapters for vllm in vllms]
    with Served(tmp_path_factory.mktemp("wired"), urls=[wire.url for wire in wires], wait_s=4) as server:
        server.port = ports[1]
        server.launch()
        server.wait_ready(START_S)
        yield server
        assert server.stop() == 0
    assert [vllm.adapters for vllm in vllms] == before  # it takes its own along


def up(server: Served) -> list[bool]:
    lines = sorted(line for line in server.metrics().splitlines() if line.startswith("palestra_replica_up{"))
    return [line.endswith(" 1.0") for line in lines]


def test_what_a_lost_server_was_sampling_goes_to_another(wired: Served, wires: list[Wire], vllms: tuple[Vllm, Vllm]):
    service = wired.client()
    training = service.create_lora_training_client(base_model=MODEL, rank=4, train_unembed=False)
    sampler = training.save_weights_and_get_sampling_client()
    wired.until(lambda: up(wired) == [True, True])
    future = begin(sampler)
    wired.until(lambda: vllms[0].count("vllm:num_requests_running") > 0)
    wires[0].cut()
    try:
        assert len(future.result().sequences[0].tokens) == LONG
        wired.until(lambda: up(wired) == [False, True])
        assert len(begin(sampler, 5).result().sequences[0].tokens) == 5
    finally:
        wires[0].mend()
    wired.until(lambda: up(wired) == [True, True], timeout_s=60)
    assert wired.http().get("/readyz").status_code == 200


def test_without_any_server_a_sample_waits_for_a_while_and_then_fails(wired: Served, wires: list[Wire]):
    sampler = wired.client().create_sampling_client(base_model=MODEL)
    begin(sampler, 5).result()
    for wire in wires:
        wire.cut()
    try:
        wired.until(lambda: up(wired) == [False, False])
        with pytest.raises(tinker.RequestFailedError, match="no sampler was available for 4 s"):
            begin(sampler, 5).result()
        assert wired.http().get("/readyz").status_code == 503
    finally:
        for wire in wires:
            wire.mend()
    wired.until(lambda: up(wired) == [True, True], timeout_s=60)
    assert len(begin(sampler, 5).result().sequences[0].tokens) == 5


# Servers of our own


def processes(server: Served) -> list[psutil.Process]:
    """vLLM's, the one that answers HTTP first."""
    children = psutil.Process(server.pid).children()
    (first,) = [c for c in children if "vllm.entrypoints.openai.api_server" in c.cmdline()]
    return [first, *first.children(recursive=True)]


def test_the_first_samples_of_a_cpu_build_compile_nothing(own: Served):
    """On x86_64 that took longer than vLLM waits for a sample."""
    training = own.client().create_lora_training_client(base_model=MODEL, rank=4, train_unembed=False)
    for sampler in (
        training.save_weights_and_get_sampling_client(),
        own.client().create_sampling_client(base_model=MODEL),
    ):
        assert len(begin(sampler, 5).result().sequences[0].tokens) == 5
    assert [file for file in (own.state / COMPILED).rglob("*") if file.is_file()] == []


def test_a_killed_vllm_is_started_again_and_the_sample_comes(own: Served):
    training = own.client().create_lora_training_client(base_model=MODEL, rank=4, train_unembed=False)
    sampler = training.save_weights_and_get_sampling_client()
    begin(sampler, 5).result()
    future = begin(sampler)
    with (
        own.openai() as client,
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Go on"}],
            max_tokens=LONG,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as stream,
    ):
        chunks = iter(stream)
        next(chunks)
        killed = processes(own)
        killed[0].kill()
        with pytest.raises(openai.APIError):  # half of it is out: nothing else could follow
            list(chunks)
    assert len(future.result(timeout=START_S).sequences[0].tokens) == LONG
    assert {p.pid for p in killed}.isdisjoint(p.pid for p in processes(own))
    psutil.wait_procs(killed, timeout=30)
    assert not [p for p in killed if p.is_running()]
    logs = list((own.state / "logs").glob("*-vllm-0.log"))
    assert len(logs) == 1


def test_vllm_goes_with_its_server(own: Served):
    """However that ends."""
    vllm = processes(own)
    own.kill()
    _, alive = psutil.wait_procs(vllm, timeout=60)
    assert not alive
    own.launch()
    own.wait_ready(START_S)


@pytest.mark.parametrize(
    ("python", "said"),
    [(sys.executable, "vLLM did not start: No module named 'vllm'"), ("no/such/python", "cannot be run")],
)
def test_a_vllm_that_cannot_start_is_told_in_one_line(tmp_path: Path, python: str, said: str):
    with Served(tmp_path, python=python) as server:
        server.launch()
        assert server.process is not None
        assert server.process.wait(60) == 1
        (line,) = [line for line in server.said().splitlines() if line.startswith("error: ")]
        assert said in line


def test_a_vllm_that_was_started_wrongly_is_told_in_one_line(
    tmp_path: Path, vllms: tuple[Vllm, Vllm], ports: tuple[int, ...]
):
    with Served(tmp_path, urls=[vllms[0].url]) as server:
        server.port = ports[2]
        server.overrides.append("models.0.vllm.max_lora_rank=64")
        server.launch()
        assert server.process is not None
        try:
            assert server.process.wait(120) == 1
        except subprocess.TimeoutExpired:
            pytest.fail(server.tail())
        (line,) = [line for line in server.said().splitlines() if line.startswith("error: ")]
        assert "cannot load an adapter of rank 64 (vllm.max_lora_rank)" in line
