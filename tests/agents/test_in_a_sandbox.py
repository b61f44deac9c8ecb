"""Agents play their episodes in a sandbox that has one door, to the model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from palestra.episodes import Episode
from palestra.sandbox import ExecResult, ModelDoor, SandboxLimits, SandboxSpec, backend, sandbox
from tests.agents.conftest import Stage
from tests.agents.programs import INSTALLED, LIMIT_S, NPM, PROGRAMS, AgentProgram

OF_NODE = [program for program in PROGRAMS if program.path.is_relative_to(NPM)]
"""The others' Python is part of a home, which is not there inside."""

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]


async def played(program: AgentProgram, episode: Episode) -> tuple[ExecResult, bytes]:
    """Runs it as it is: the door appears at the server's own port, so that every address stays as it was."""
    port = urlsplit(episode.base_url).port
    assert port is not None
    spec = SandboxSpec(
        workdir="/episode",
        host_folders=(str(INSTALLED.resolve()),),
        door=ModelDoor(episode.base_url, port=port),
        env=episode.environment | dict(program.environment(episode)),
        files={name: text.encode() for name, text in program.files(episode).items()},
        limits=SandboxLimits(exec_s=LIMIT_S),
    )
    path = INSTALLED.resolve() / program.path.relative_to(INSTALLED)
    async with sandbox("local", spec) as box:
        done = await box.exec([str(path), *program.command(episode, f"Please do {program.task}.")])
        return done, await box.read("out.txt") if done.status == 0 else b""


@pytest.mark.parametrize("program", OF_NODE, ids=lambda program: program.name)
def test_an_agent_plays_an_episode_behind_the_wall(program: AgentProgram, stage: Stage) -> None:
    if not program.path.exists():
        pytest.skip(f"{program.name} is not installed; run: make agents")
    if problem := backend("local").problem():
        pytest.skip(problem)
    with stage.register() as client, client.episode(stage.run) as episode:
        done, written = asyncio.run(played(program, episode))
        assert done.status == 0, done.text + done.stderr.decode()
        assert written.decode().strip() == program.word
        assert episode.end(reward=0.5).is_kept
    assert stage.played()["info"]["result"]["reward"] == 0.5
    assert not Path("/episode").exists()
