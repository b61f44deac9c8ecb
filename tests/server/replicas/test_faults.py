"""Replicas, the trainer or the server are killed in the middle: nobody loses a sample, and none is counted twice."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import tinker

from tests.server.conftest import Server
from tests.server.model_api.conftest import MODEL, ephebe_in
from tests.server.replicas.test_replicas import begin, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = 400  # tokens: some seconds
PROMPTS = [[n, n + 1, 2] for n in range(12)]


@pytest.fixture(scope="module")
def pair(make_module_server: Callable[..., Server]) -> Server:
    return make_module_server("models.0.replicas=2", "models.0.threads=1")


def pids(server: Server) -> list[int]:
    files = [server.state / server.worker / f"replica-{n}" / "worker.json" for n in range(2)]
    return [json.loads(file.read_text())["pid"] for file in files]


def up(server: Server) -> list[bool]:
    lines = sorted(line for line in server.metrics().splitlines() if line.startswith("palestra_replica_up{"))
    return [line.endswith(" 1.0") for line in lines]


def count(server: Server, name: str) -> float:
    lines = [line for line in server.metrics().splitlines() if re.match(rf"{name}\{{", line)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def all_begun(sampler: tinker.SamplingClient) -> list[Any]:
    return [begin(sampler, prompt, seed=n, max_tokens=LONG) for n, prompt in enumerate(PROMPTS)]


def are_same(found: list[list[int]], expected: list[list[int]]) -> bool:
    """All whole, and the same but for one: on a CPU the last bits depend on the batch, and a draw may sit on a border.
    Other weights would change nearly all."""
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    return {len(one) for one in found} == {LONG} and same >= len(expected) - 1


def tokens(futures: list[Any]) -> list[list[int]]:
    return [future.result(timeout=200).sequences[0].tokens for future in futures]


def test_a_replica_that_is_killed_costs_nobody_a_sample(pair: Server):
    client = pair.client()
    sampler = trained(client).save_weights_and_get_sampling_client()
    expected = tokens(all_begun(sampler))
    before, counted = pids(pair), count(pair, "palestra_tokens_sampled_total")
    futures = all_begun(sampler)
    pair.until(lambda: is_busy(before[0]))
    os.kill(before[0], signal.SIGKILL)
    assert are_same(tokens(futures), expected)
    assert count(pair, "palestra_replica_retries_total") > 0
    assert count(pair, "palestra_tokens_sampled_total") == counted + LONG * len(PROMPTS)
    pair.until(lambda: up(pair) == [True, True])
    assert pids(pair)[0] != before[0]
    assert pids(pair)[1] == before[1]
    assert are_same(tokens(all_begun(sampler)), expected)  # the new one has the adapter, too
    client.close("success").result()


def is_busy(pid: int) -> bool:
    return psutil.Process(pid).cpu_percent(0.1) > 10


def test_without_any_replica_samples_wait_for_the_next(pair: Server):
    client = pair.client()
    sampler = trained(client).save_weights_and_get_sampling_client()
    expected = tokens(all_begun(sampler))
    futures = all_begun(sampler)
    for pid in pids(pair):
        os.kill(pid, signal.SIGKILL)
    assert are_same(tokens(futures), expected)
    client.close("success").result()


def test_samples_go_on_while_the_trainer_is_killed(pair: Server):
    client = pair.client()
    training = trained(client)
    sampler = training.save_weights_and_get_sampling_client()
    expected = tokens(all_begun(sampler))
    futures = all_begun(sampler)
    old = pair.kill_worker()
    again = training.save_weights_and_get_sampling_client()  # its bytes come from the next worker
    assert are_same(tokens(all_begun(again)), expected)
    assert are_same(tokens(futures), expected)
    pair.wait_worker(other_than=old)
    client.close("success").result()


def test_an_adapter_that_arrives_damaged_is_asked_for_again(make_server: Callable[..., Server]):
    server = make_server("models.0.replicas=1", start=False)
    server.sabotage(
        """
        import hashlib, itertools, types
        import palestra.engine.adapter_sending as sending
        times = itertools.count()
        sending.hashlib = types.SimpleNamespace(
            sha256=lambda file: hashlib.sha256(file if next(times) else b"something else")
        )
        """
    )
    server.start()
    client = server.client()
    sampler = trained(client).save_weights_and_get_sampling_client()
    assert len(begin(sampler, PROMPTS[0]).result().sequences[0].tokens) == 12
    assert "an adapter does not match its digest" in server.said()
    client.close("success").result()


def test_a_restarted_server_finds_its_replicas_again(pair: Server):
    client = pair.client()
    sampler = trained(client).save_weights_and_get_sampling_client()
    expected, before = tokens(all_begun(sampler)), pids(pair)
    pair.restart()
    assert pids(pair) == before
    assert up(pair) == [True, True]
    assert are_same(tokens(all_begun(sampler)), expected)
    client.close("success").result()
    assert pair.stop() == 0  # nothing is left behind


def test_an_answer_is_streamed_and_breaks_off_with_its_replica(tmp_path: Path):
    with ephebe_in(tmp_path, "models.0.replicas=1", "models.0.threads=1") as server:
        server.start()
        asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Go on"}], "temperature": 0}
        with server.openai() as client:
            whole = client.chat.completions.create(**asked, max_tokens=20).choices[0].message.content
            parts = [
                part.choices[0].delta.content
                for part in client.chat.completions.create(**asked, max_tokens=20, stream=True)
            ]
            assert "".join(filter(None, parts)) == whole
            long = client.chat.completions.create(
                **asked, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(long))
            file = next(server.state.glob("worker-*/replica-0/worker.json"))
            os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)
            with pytest.raises(openai.APIError):  # half of it is out: nothing else could follow
                list(long)
            assert client.chat.completions.create(**asked, max_tokens=20).choices[0].message.content == whole
