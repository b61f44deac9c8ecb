"""The wall around agents: our server is reached, and no other address is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.conftest import Stage
from tests.agents.frameworks import python
from tests.agents.walled import run_walled
from tests.sandbox import attacks
from tests.sandbox.outside import Outside

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

PYTHON = python("frameworks")
ASK = """
import os, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", headers=headers)
print("server answers", urllib.request.urlopen(request).status)
"""


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    found = Outside(tmp_path)
    yield found
    found.close()


def test_an_agent_reaches_our_server_and_no_other_address(stage: Stage, outside: Outside) -> None:
    program = attacks.program("network", **outside.values())
    with stage.register() as client, client.episode(stage.run) as episode:
        asked = run_walled(PYTHON, ["-c", ASK], episode, {}, {})
        tried = run_walled(PYTHON, ["-c", program], episode, {}, {})
        assert episode.end(reward=0.0).is_kept
    assert asked.said == "server answers 200\n"
    assert tried.said == "held\n"
    without = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "GOT TCP to 127.0.0.1" in without  # the attempts are sound: without the wall they get through
    assert "GOT an abstract Unix socket" in without


def test_an_agent_has_folders_of_its_own(stage: Stage, outside: Outside) -> None:
    program = attacks.program("files", **outside.values())
    with stage.register() as client, client.episode(stage.run) as episode:
        tried = run_walled(PYTHON, ["-c", program], episode, {}, {})
        seen = run_walled(PYTHON, ["-c", "import os; print(os.getcwd(), os.environ['HOME'])"], episode, {}, {})
        assert episode.end(reward=0.0).is_kept
    assert tried.said == "held\n"
    assert seen.said == "/episode /home/agent\n"
    assert not Path("/episode").exists()
