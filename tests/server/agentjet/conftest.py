"""A server without keys, as AgentJet's clients expect it, and what they and their trainers do.

def test_x(trainer): ...       a trainer of the shared server, with a run of its own: the `Api` of tests/server/episodes
def test_y(agentjet): ...      a client that behaves as AgentJet's own
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import KEY
from tests.server.episodes.conftest import Api, keyed, keys
from tests.server.model_api.conftest import Ephebe, ephebe_in, make_ephebe

__all__ = ["keyed", "keys", "make_ephebe"]

_numbers = itertools.count()
HI: list[Any] = [{"role": "user", "content": "Hi"}]


KEPT = ("episode_uuid", "openai_base_url", "openai_api_key")
"""What AgentJet's own class keeps of a claim."""


@dataclass
class AgentJet:
    """No key, no lease, a connection of its own for each call, and whatever fails is swallowed. `told`: what it would
    have logged."""

    url: str
    client_uuid: str = field(default_factory=lambda: uuid.uuid4().hex)
    claims: dict[str, Any] = field(default_factory=dict)
    """What it was told, by episode: the original throws away what it does not know."""
    told: list[str] = field(default_factory=list)

    def begin_episode(self, allow_discard_timeout: float = 60, episode_type: str = "train") -> tuple[str, Any]:
        request = {"client_uuid": self.client_uuid, "episode_type": episode_type}
        while True:
            answer = self._post("claim_episode", 30, **request, allow_discard_timeout=allow_discard_timeout)
            if answer is not None and answer["success"]:
                self.claims[answer["episode_uuid"]] = answer
                return answer["episode_uuid"], {name: answer[name] for name in KEPT}
            time.sleep(0.02)

    def end_episode(self, episode_uuid: str, **output: Any) -> None:
        names = {"client_uuid": self.client_uuid, "episode_uuid": episode_uuid}
        answer = self._post("end_episode", 30, **names, workflow_output=output)
        if answer is not None and not answer["success"]:
            self.told.append(answer["failure_reason"])

    def can_continue_episode(self, episode_uuid: str) -> bool:
        names = {"client_uuid": self.client_uuid, "episode_uuid": episode_uuid}
        answer = self._post("can_continue_episode", 10, **names)
        return answer is not None and answer["can_continue"]

    def _post(self, path: str, timeout_s: float, **body: Any) -> Any:
        try:
            with httpx.Client(verify=False, trust_env=False, timeout=timeout_s) as http:
                answer = http.post(f"{self.url}/{path}", json=body)
                answer.raise_for_status()
                return answer.json()
        except httpx.HTTPStatusError as error:
            self.told.append(error.response.text)
        except httpx.HTTPError as error:
            self.told.append(repr(error))
        return None


@dataclass
class Root:
    """The endpoints themselves: `root.post("claim_episode", client_uuid=…)`."""

    server: Ephebe
    key: str | None = KEY

    def send(self, path: str, **body: Any) -> httpx.Response:
        return self.server.http(key=self.key).post(f"/{path}", json=body)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.send(path, **body)
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
        return answer.json()

    def claim(self, client_uuid: str = "c", episode_type: str = "train", wait_s: float = 0.0, **fields: Any) -> Any:
        request = {"client_uuid": client_uuid, "episode_type": episode_type, "wait_s": wait_s}
        return self.post("claim_episode", **{"allow_discard_timeout": 60, **request} | fields)

    def end(self, episode_uuid: str, reward: Any = 1.0, client_uuid: str = "c", **fields: Any) -> Any:
        names = {"client_uuid": client_uuid, "episode_uuid": episode_uuid}
        return self.post("end_episode", **names, workflow_output={"reward": reward}, **fields)

    def end_with(self, episode_uuid: str, **output: Any) -> httpx.Response:
        return self.send("end_episode", client_uuid="c", episode_uuid=episode_uuid, workflow_output=output)

    def can_continue(self, episode_uuid: str, client_uuid: str = "c", **fields: Any) -> Any:
        return self.post("can_continue_episode", client_uuid=client_uuid, episode_uuid=episode_uuid, **fields)


def say(claim: Any, content: str = "Hi") -> Any:
    """With what the claim says, and nothing else."""
    options = {"base_url": claim["openai_base_url"], "api_key": claim["openai_api_key"], "max_retries": 0}
    with openai.OpenAI(**options) as client:
        return client.chat.completions.create(
            model="reserved_field",
            messages=[{"role": "user", "content": content}],
            max_tokens=4,
            extra_body={"return_token_ids": True},
        )


def task_of(claim: Any) -> Any:
    """With what AgentJet's own class keeps of it."""
    headers = {"Authorization": f"Bearer {claim['openai_api_key']}"}
    return httpx.get(f"{claim['openai_base_url']}/task", headers=headers, trust_env=False)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ephebe]:
    """One for all tests here. It may be killed, if it is started again."""
    with ephebe_in(tmp_path_factory.mktemp("tinkerscript")) as server:
        server.start()
        yield server


@pytest.fixture
def trainer(plain: Ephebe) -> Iterator[Api]:
    """Nothing of its run is left for the claims of other tests."""
    api = Api(plain, run=f"tinkerscript-{next(_numbers)}")
    api.put_run(backoff_s=0)
    yield api
    api.send("DELETE", f"runs/{api.run}")


@pytest.fixture
def agentjet(plain: Ephebe) -> AgentJet:
    return AgentJet(plain.url)


@pytest.fixture
def root(plain: Ephebe) -> Root:
    return Root(plain)


@pytest.fixture
def owner_of(keyed: Ephebe) -> Callable[..., str]:
    """`owner_of("bob", "worker")`: a new key."""
    return lambda owner, right="trainer": keyed.make_key(f"key-{next(_numbers)}", owner=owner, right=right)
