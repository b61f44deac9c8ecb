"""Agents by name, as `palestra agent play` starts them: found, shown in the sandbox, told their task; unmodified."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from palestra.agents import AgentPlayer, UnknownAgentProgram, find_agent
from palestra.agents.installation import Installation, find_installation
from palestra.agents.program import AgentTask
from palestra.cli import main
from palestra.cli.agent.play import list_
from palestra.config.agents import AgentConfig
from palestra.episodes import AsyncEpisodeClient
from palestra.sandbox import SandboxUnavailable
from palestra.testing.puppet import Cue
from tests.agents.coding_run import CodingRun, needs_wall
from tests.agents.conftest import CONTEXT, PuppetServer, serving
from tests.agents.programs import CLAUDE_CODE, CODEX, MINI_SWE_AGENT, OPENCODE, QWEN_CODE, AgentProgram
from tests.coding.folders import harbor
from tests.sandbox.needs import needs_local

TOLD = AgentTask(prompt="Do it.", model="m", base_url="http://127.0.0.1:8000/v1", api_key="ep-1")
TRAINED = {
    "kind": "grpo",
    "steps": 1,
    "model": {"name": "ephebe-shell"},
    "rollouts": "agent",
    "agent": {"command": ["claude"]},
    "environments": [{"name": "coding"}],
}
PROGRAMS = {
    "claude": CLAUDE_CODE,
    "codex": CODEX,
    "opencode": OPENCODE,
    "qwen": QWEN_CODE,
    "mini": MINI_SWE_AGENT,
}


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_words_after_a_name_are_its_last_arguments() -> None:
    command = find_agent(["codex", "-c", "model_context_window=65536"]).command(TOLD)
    assert command[:2] == ["codex", "exec"]
    assert command[-2:] == ["-c", "model_context_window=65536"]


def test_a_line_is_for_the_shell_and_words_are_a_program() -> None:
    assert find_agent(['my-agent "$PROMPT"']).command(TOLD) == ["sh", "-c", 'my-agent "$PROMPT"']
    assert find_agent(["python3", "-m", "agent"]).command(TOLD) == ["python3", "-m", "agent"]
    with pytest.raises(UnknownAgentProgram, match="did you mean opencode"):
        find_agent(["open-code"])


def test_every_agent_gets_the_address_and_the_key_of_both_apis() -> None:
    env = find_agent(["claude"]).environment(TOLD)
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"
    assert env["OPENAI_BASE_URL"] == "http://127.0.0.1:8000/v1"
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == "ep-1"


def test_an_installation_shows_its_packages_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = executable(tmp_path / "tool" / "node_modules" / "agent" / "cli.js")
    (tmp_path / "home" / "bin").mkdir(parents=True)
    (tmp_path / "home" / "bin" / "agent").symlink_to(script)
    monkeypatch.setenv("PATH", f"{tmp_path}/home/bin:{os.environ['PATH']}")
    found = find_installation("agent")
    assert found.folders == (str(tmp_path / "tool" / "node_modules"),)
    assert found.program == str(script)


def test_an_installation_in_a_python_environment_shows_the_environment(tmp_path: Path) -> None:
    program = executable(tmp_path / "venv" / "bin" / "agent")
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    assert find_installation(str(program)).folders == (str(tmp_path / "venv"),)


def test_a_program_of_the_machine_needs_no_folder() -> None:
    assert find_installation("sh").folders == ()
    with pytest.raises(UnknownAgentProgram, match="not installed"):
        find_installation("no-such-agent")


@needs_local
def test_an_agent_below_a_folder_that_sandboxes_replace_is_refused_before_it_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders of tests are below /tmp."""
    with TemporaryDirectory(dir="/tmp") as folder:
        executable(Path(folder) / "claude")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        listed = CliRunner().invoke(list_, []).output
        assert f"claude    no: {folder}/claude needs {folder}, but a sandbox has its own /tmp: install it" in listed
        with pytest.raises(SandboxUnavailable, match="its own /tmp"):
            AgentPlayer(AgentConfig(command=["claude"]), {}, tmp_path, AsyncEpisodeClient("http://127.0.0.1:1"))
        (config := tmp_path / "agent.json").write_text(json.dumps(TRAINED | {"runs": str(tmp_path / "runs")}))
        for command in (["eval", "--agent", "claude", f"runs={tmp_path / 'runs'}"], ["train", str(config)]):
            refused = CliRunner().invoke(main, command)
            assert refused.exit_code == 1
            assert f"error: the agent cannot play here: {folder}/claude needs {folder}" in refused.stderr
    assert not (tmp_path / "runs").exists()  # and no server was started


def test_an_agent_below_a_tasks_own_folder_is_refused() -> None:
    installed = Installation("/app/bin/agent", ("/app/bin",))
    assert installed.hidden_by() is None
    assert "its own /app" in str(installed.hidden_by(["/tmp", "/app"]))


@pytest.fixture(scope="module")
def agents_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PuppetServer]:
    needs_wall()
    script: list[Cue] = [cue for program in PROGRAMS.values() for cue in program.script]
    with serving(script, tmp_path_factory.mktemp("named"), CONTEXT) as server:
        yield server


@pytest.mark.agents
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_named_agent_solves_a_task_unmodified(name: str, agents_server: PuppetServer, tmp_path: Path) -> None:
    program: AgentProgram = PROGRAMS[name]
    if not program.path.exists():
        pytest.skip(f"{name} is not installed; run: make agents")
    files = {
        "task.toml": "[agent]\ntimeout_sec = 240\n",
        "instruction.md": f"Please do {program.task}.\n",
        "tests/test.sh": f"grep -q {program.word} out.txt && echo 1 > /logs/verifier/reward.txt\n",
    }
    harbor(tmp_path / "tasks" / "write", **files)
    run = CodingRun(agents_server).register("write")
    run.play(tmp_path, tmp_path / "tasks", name, PATH=f"{program.path.parent}:{os.environ['PATH']}")
    (episode,) = run.played()
    kept = run.records(tmp_path)
    assert episode["info"]["result"]["reward"] == 1.0, kept["agent.log"]
    assert tuple(one["agent"] for one in episode["trajectories"]) == program.agents
    assert kept["changes.patch"].count("diff --git") == 1  # no settings of the agent in the task's folder
