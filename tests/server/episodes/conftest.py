"""A server with keys, and its episode API.

def test_x(alice): ...                 an `Api` of the shared server: alice is a trainer, with a run of her own
def test_y(alice, worker, bob): ...    a worker of alice's, and another trainer
def test_z(api): ...                   of another one, without keys: to be killed and stopped
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import KEY
from tests.server.model_api.conftest import Ephebe, ephebe_in, make_ephebe

__all__ = ["make_ephebe"]

_numbers = itertools.count()


@dataclass
class Api:
    """Episodes over HTTP, with one key and one run."""

    server: Ephebe
    key: str = KEY
    run: str = field(default_factory=lambda: f"run-{next(_numbers)}")
    client_id: str = "player"
    metrics_key: str = KEY

    def send(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        http = self.server.http(key=self.key)
        return http.request(method, f"/episodes/v1/{path}", json=body, **options)

    def get(self, path: str, **query: Any) -> Any:
        return _sound(self.send("GET", path, params=query))

    def post(self, path: str, **body: Any) -> Any:
        return _sound(self.send("POST", path, body))

    def of_run(self, what: str, **body: Any) -> Any:
        return self.post(f"runs/{self.run}/{what}", **body)

    def put_run(self, model: str | None = None, **settings: Any) -> Any:
        return _sound(self.send("PUT", f"runs/{self.run}", {"model": model, "settings": settings or None}))

    def info(self) -> Any:
        return self.get(f"runs/{self.run}")

    def register(self, group_id: str = "g", size: int = 1, **fields: Any) -> list[str]:
        """Ids of its episodes."""
        return self.of_run("groups", groups=[group(group_id, size, **fields)])["groups"][0]["episode_ids"]

    def claim(self, claim_id: str | None = None, **fields: Any) -> list[Any]:
        request = {"client_id": self.client_id, "claim_id": claim_id or f"claim-{next(_numbers)}", "run": self.run}
        return self.post("claim", **request | fields)["leases"]

    def claim_one(self, **fields: Any) -> Any:
        (lease,) = self.claim(**fields)
        return lease

    def beat(self, *leases: Any) -> list[Any]:
        return self.post("heartbeat", client_id=self.client_id, leases=[ref(lease) for lease in leases])["beats"]

    def end(self, lease: Any, reward: float | None = 1.0, **result: Any) -> Any:
        ends = [ref(lease) | {"result": {"reward": reward, **result}}]
        return self.post("end", client_id=self.client_id, ends=ends)["ended"][0]

    def played(self, **query: Any) -> list[Any]:
        return self.get(f"runs/{self.run}/groups", **{"wait_s": 10} | query)["groups"]

    def metrics(self) -> str:
        return self.server.http(key=self.metrics_key).get("/metrics").text

    def metric(self, name: str) -> float:
        lines = self.metrics().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))

    def episode(self, episode_id: str) -> Any:
        return self.get(f"episodes/{episode_id}")


def group(group_id: str = "g", size: int = 1, **fields: Any) -> dict[str, Any]:
    task = {"id": "t", "environment": "arithmetic", "prompt": [{"role": "user", "content": "What is 1 + 1?"}]}
    return {"group_id": group_id, "size": size, "task": task, **fields}


def ref(lease: Any) -> dict[str, Any]:
    return {"episode_id": lease["episode_id"], "attempt": lease["attempt"]}


def player(lease: Any, **options: Any) -> openai.OpenAI:
    """With what the lease says, and nothing else."""
    response = {"base_url": lease["base_url"], "api_key": lease["api_key"], "max_retries": 0, "timeout": 60}
    return openai.OpenAI(**response | options)


def say(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    request = {"model": "policy", "messages": messages, "max_tokens": 6, "extra_body": {"return_token_ids": True}}
    return client.chat.completions.create(**request | options)


def whole(answer: Any) -> list[int]:
    """What the engine read and drew."""
    return [*answer.prompt_token_ids, *answer.choices[0].token_ids]


def went_on(messages: Any, answer: Any, question: str = "And 2 + 2?") -> list[Any]:
    said = answer.choices[0].message
    return [*messages, {"role": "assistant", "content": said.content}, {"role": "user", "content": question}]


def _sound(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
    return answer.json()


@pytest.fixture(scope="session")
def keyed(shared_ephebe: Callable[..., Ephebe]) -> Ephebe:
    """One for all tests here, with keys: do not kill it."""
    mask = r'episodes.mask=["555-\\d{4}"]'
    return shared_ephebe("episodes.hold_calls_s=5", mask, require_key="always", log_level="debug")


@pytest.fixture(scope="session")
def keys(keyed: Ephebe) -> dict[str, str]:
    made = {"alice": ("alice", "trainer"), "bob": ("bob", "trainer"), "worker": ("alice", "worker")}
    made |= {"other worker": ("alice", "worker"), "prometheus": ("prometheus", "metrics")}
    return {
        name: keyed.make_key(f"{name} {next(_numbers)}", owner=owner, right=right)
        for name, (owner, right) in made.items()
    }


@pytest.fixture
def alice(keyed: Ephebe, keys: dict[str, str]) -> Api:
    api = Api(keyed, keys["alice"], metrics_key=keys["prometheus"])
    api.put_run()
    return api


@pytest.fixture(scope="session")
def frail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ephebe]:
    """One for all tests that kill it, without keys."""
    server = ephebe_in(tmp_path_factory.mktemp("frail"), "episodes.hold_calls_s=0.1", "episodes.min_lease_s=0.2")
    with server:
        yield server


@pytest.fixture
def api(frail: Ephebe) -> Api:
    """Of the one that may be killed or stopped; it runs."""
    if frail.process is None or frail.process.poll() is not None:
        frail.start()
    api = Api(frail)
    api.put_run()
    return api


@pytest.fixture
def worker(keyed: Ephebe, keys: dict[str, str], alice: Api) -> Api:
    return Api(keyed, keys["worker"], alice.run)


@pytest.fixture
def bob(keyed: Ephebe, keys: dict[str, str]) -> Api:
    return Api(keyed, keys["bob"])
