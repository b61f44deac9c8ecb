"""`palestra serve` with the bundled model, and clients of OpenAI's SDK.

def test_x(chat): ...                  a function: messages in, a completion out, by the shared server
def test_y(ephebe): ...                the shared server; `ephebe.openai()` is a client of it
def test_y(narrow): ...                another, with small limits
def test_z(mortal): ...                a shared one that may be killed
def test_z(make_ephebe): ...           one of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from palestra.config.bundled import bundled_model
from tests.server.conftest import Server

MODEL = "ephebe"


class Ephebe(Server):
    name, worker = MODEL, "worker-ephebe"

    def openai(self, key: str = "tml-test", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)


def ephebe_in(folder: Path, *overrides: str, **settings: Any) -> Ephebe:
    model = bundled_model(MODEL)
    assert model is not None
    return Ephebe(folder, model, *overrides, **settings)


@pytest.fixture(scope="session")
def ephebe(shared_ephebe: Callable[..., Ephebe]) -> Ephebe:
    return shared_ephebe()


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ephebe]:
    """One with room for little, which is swept often."""
    little = ("limits.max_turns=2", "limits.max_pending_samples=1", "keep_results_s=0")
    with ephebe_in(tmp_path_factory.mktemp("narrow"), *little) as server:
        server.start()
        yield server


@pytest.fixture
def mortal(shared_ephebe: Callable[..., Ephebe]) -> Ephebe:
    """One that tests may kill, with room for one conversation."""
    return revived(shared_ephebe("limits.max_conversations=1"))


@pytest.fixture
def mortal_keyed(shared_ephebe: Callable[..., Ephebe]) -> Ephebe:
    return revived(shared_ephebe(require_key="always"))


def revived(server: Ephebe) -> Ephebe:
    """Whatever the test before has done to it."""
    if server.process is None or server.process.poll() is not None:
        server.start()
    server.wait_worker()
    return server


@pytest.fixture
def make_ephebe(tmp_path: Path) -> Iterator[Callable[..., Ephebe]]:
    made: list[Ephebe] = []

    def make(*overrides: str, **settings: Any) -> Ephebe:
        made.append(ephebe_in(tmp_path / f"ephebe{len(made)}", *overrides, **settings))
        made[-1].start()
        return made[-1]

    yield make
    for server in made:
        server.end()


@pytest.fixture(scope="session")
def client(ephebe: Ephebe) -> Iterator[openai.OpenAI]:
    with ephebe.openai() as client:
        yield client


@pytest.fixture(scope="session")
def chat(client: openai.OpenAI) -> Callable[..., Any]:
    """`chat("Hello", max_tokens=5)`, or with a list of messages; `extra_body` for vLLM's fields."""

    def ask(messages: str | list[Any], **options: Any) -> Any:
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return client.chat.completions.create(**{"model": MODEL, "messages": given, "max_tokens": 32} | options)

    return ask
