"""Model servers in front of `palestra serve` with the bundled model.

def test_x(policy): ...        token ids on, chat completions of the endpoint below, all calls of rollouts kept
def test_y(ephebe): ...        the endpoint itself
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from tests.gym.models.scripted import listening, model
from tests.server.model_api.conftest import Ephebe, ephebe

if TYPE_CHECKING:
    import anthropic

__all__ = ["ephebe"]


@dataclass(slots=True)
class Policy:
    url: str
    folder: Path
    """Where calls are kept."""

    def openai(self, prefix: str = "") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}{prefix}/v1", api_key="unused", max_retries=0, timeout=60)

    def anthropic(self, prefix: str = "") -> anthropic.Anthropic:
        import anthropic

        return anthropic.Anthropic(base_url=self.url + prefix, api_key="unused", max_retries=0, timeout=60)

    def upstream_calls(self) -> int:
        return httpx.get(f"{self.url}/stats").json().get("calls", 0)


@pytest.fixture(scope="session")
def policy(ephebe: Ephebe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = tmp_path_factory.mktemp("capture")
    gym = {
        "observability_enabled": True,
        "model_call_capture_dir": str(folder),
        "token_id_capture": {"enabled": True, "dir": str(folder)},
    }
    with listening(model(gym, base_url=f"{ephebe.url}/v1", return_token_id_information=True)) as url:
        yield Policy(url, folder)
