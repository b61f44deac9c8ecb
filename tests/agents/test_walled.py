"""The wall around agents: our server is reached, and no other address is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from palestra.testing.puppet import Cue
from tests.agents.conftest import CONTEXT, Stage, serving
from tests.agents.frameworks import python
from tests.agents.programs import CLAUDE_CODE, CODEX, QWEN_CODE, AgentProgram, tool_call
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


TRY = "for one in attack-*.py; do /usr/bin/python3 $one; done > out.txt 2>&1; echo all-were-tried"
TOOLS = {
    CLAUDE_CODE: tool_call("Bash", command=TRY, description="Try them."),
    CODEX: tool_call("exec_command", cmd=TRY),
    QWEN_CODE: tool_call("run_shell_command", command=TRY, is_background=False),
}
"""How these agents let their model run the attacks."""


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


@pytest.mark.parametrize("program", TOOLS, ids=lambda program: program.name)
def test_no_attack_gets_out_through_the_tools_of_an_agent(
    program: AgentProgram, outside: Outside, tmp_path: Path
) -> None:
    names = [
        name for name in attacks.ATTACKS if name not in ("entering", "descriptors")
    ]  # those have files of the agent
    files = {f"attack-{place}.py": attacks.program(name, **outside.values()) for place, name in enumerate(names)}
    script = [Cue(when="task-escape", say=TOOLS[program]), Cue(when="all-were-tried", say="Nobody got out")]
    with serving(script, tmp_path / "server", CONTEXT) as server:
        stage = Stage(server)
        with stage.register() as client, client.episode(stage.run) as episode:
            ran = replace(program, files=lambda _: files).run(episode, "Please do task-escape.")
            assert episode.end(reward=0.0).is_kept
    assert "Nobody got out" in ran.done.text, ran.said
    assert ran.written.splitlines() == ["held"] * len(names), ran.said
