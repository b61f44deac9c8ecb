"""A run's alias: agents elsewhere sample its newest weights under one name, and go on doing so when it is over."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import openai
import pytest
import tinker

from palestra.config.bundled import EPHEBE
from palestra.config.train import load_train_config
from palestra.endpoints.aliases import RunAlias
from palestra.runs.listener import Silence
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.writer import RunFolder
from palestra.training.launch import train
from tests.training.loops.test_sft import an_sft_config
from tests.training.loops.test_sft import start as start_sft
from tests.training.test_resume import write_config
from tests.training.trainers import FEW, start, wait_for_steps

ARITHMETIC = [{"name": "arithmetic"}]
HI: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]


class Agent(Silence):
    """Somebody who knows a server and a name, and asks after every step."""

    def __init__(self, url: str, name: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="tml-any", max_retries=0)
        self.name, self.notes = name, []
        self.turns: list[dict[str, Any]] = []
        """What the traces say: of greedy answers to one question."""
        self.messages, self.ids = HI, []

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.ask()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ask(self) -> dict[str, Any]:
        self.talk()
        answer: Any = self.client.chat.completions.create(
            model=self.name, messages=HI, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
        )
        assert answer.model == self.name
        self.turns.append(self.get(f"/traces/{answer.trace_id}")["turns"][-1])
        return self.turns[-1]

    def talk(self) -> None:
        """One conversation over all weights: it is never read anew."""
        answer: Any = self.client.chat.completions.create(
            model=self.name, messages=self.messages, max_tokens=8, extra_body={"return_token_ids": True}
        )
        assert answer.prompt_token_ids[: len(self.ids)] == self.ids
        self.ids = answer.prompt_token_ids + answer.choices[0].token_ids
        self.messages = [*self.messages, answer.choices[0].message.model_dump(), *HI]

    def get(self, path: str) -> Any:
        return self.client.get(path, cast_to=object)


def logprobs(turn: dict[str, Any]) -> list[float]:
    return turn["samples"][0]["logprobs"]


def test_an_agent_samples_the_newest_weights_during_the_run_and_after_it(ephebe_url, run_training):
    agent = Agent(ephebe_url, "mine")
    settings = {"environments": ARITHMETIC, "rollout": FEW, "checkpoint": {"every": 2}}
    run = run_training("named", agent, alias="mine", steps=2, **settings)
    weights = [turn["weights"] for turn in agent.turns]
    assert len(set(weights)) == 2
    notes = [note for note in agent.notes if "'mine'" in note]
    assert notes[-2:] == [
        f"the newest weights are model 'mine' at {ephebe_url}/v1",
        f"the alias 'mine' stays at {agent.get('/aliases/mine')['model']}",
    ]
    over = agent.ask()
    assert "/sampler_weights/final@" in over["weights"]
    assert logprobs(over) == pytest.approx(logprobs(agent.turns[1]), abs=1e-4)  # the last step's
    assert logprobs(over) != pytest.approx(logprobs(agent.turns[0]), abs=1e-3)
    version = agent.get("/aliases/mine")["version"]
    assert version == 4  # before the first step, after each of two, at the end
    config = load_train_config([], ["steps=3"], run.read_about()["config"])
    with RunFolder.open(run.path) as folder:
        asyncio.run(train(config, folder, agent))
    assert agent.get("/aliases/mine")["version"] == version + 3
    assert len({turn["weights"] for turn in agent.turns}) == 4


def test_an_interrupted_run_says_how_to_go_on_and_leaves_its_weights_under_the_name(ephebe_url, tmp_path):
    config = write_config(
        tmp_path, server=ephebe_url, environments=ARITHMETIC, alias="stopped", steps=1000, rollout=FEW
    )
    process = start(tmp_path, config, "--name", "stopped")
    wait_for_steps(tmp_path, "stopped", 1, process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 130, said
    assert "palestra train --resume stopped" in said
    assert RunReader(tmp_path / "runs" / "stopped").status() is RunStatus.STOPPED
    assert "the alias 'stopped' stays at tinker://" in said
    assert "/sampler_weights/final@" in Agent(ephebe_url, "stopped").ask()["weights"]


def test_a_run_that_publishes_nothing_is_named_when_it_is_over(ephebe_url, tmp_path):
    agent = Agent(ephebe_url, "tuned")
    agent.step = lambda step, metrics: None
    start_sft(an_sft_config(ephebe_url, "alias=tuned", "steps=1"), tmp_path, agent)
    assert agent.get("/aliases/tuned")["version"] == 1
    assert "/sampler_weights/final@" in agent.ask()["weights"]


def test_a_run_may_have_no_alias(ephebe_url, run_training):
    before = Agent(ephebe_url, "").get("/aliases")
    run_training("nameless", alias=None, steps=1, environments=ARITHMETIC, rollout=FEW)
    assert Agent(ephebe_url, "").get("/aliases") == before


def test_two_runs_under_one_name_are_told(ephebe_url):
    service = tinker.ServiceClient(base_url=ephebe_url, api_key="tml-any")
    notes: list[str] = []

    async def both() -> None:
        clients = [await service.create_sampling_client_async(base_model=EPHEBE) for _ in range(4)]
        samplers = [client._sampling_session_id for client in clients]
        async with (
            RunAlias.open(ephebe_url, "shared", notes.append) as one,
            RunAlias.open(ephebe_url, "shared", lambda text: None) as other,
        ):
            assert one is not None
            assert other is not None
            for mover, sampler in zip((one, other, one, one), samplers, strict=True):
                await mover.move(sampler)
            for _ in range(2):  # and what is refused is told once
                await one.move("no-such")

    asyncio.run(both())
    service.close("success").result()
    assert [note.partition(":")[0] for note in notes] == [
        "the newest weights are model 'shared' at http",
        "another client also moves the alias 'shared'; give this run its own",
        "the alias 'shared' was not moved",
    ]


class Elsewhere(BaseHTTPRequestHandler):
    """An API without our routes."""

    status, body = 404, b'{"detail": "Not Found"}'

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 - as its base has it


class Page(Elsewhere):
    status, body = 200, b"<html>It works!</html>"


class Anything(Elsewhere):
    status, body = 200, b'{"message": "hello"}'


@contextmanager
def listening(handler: type[Elsewhere]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("handler", [Elsewhere, Page, Anything])
def test_a_server_without_aliases_is_told_once_and_nothing_fails(handler):
    notes: list[str] = []

    async def look(url: str) -> None:
        async with RunAlias.open(url, "policy", notes.append) as alias:
            assert alias is None

    with listening(handler) as url:
        asyncio.run(look(url))
        assert notes == [f"{url} has no aliases; the newest weights get no alias (policy)"]
