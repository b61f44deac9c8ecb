"""A conversation that outgrows the context: the agents know the error, compact what was said, and go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from palestra.server.model_api.openai_responses.compaction import REQUEST
from palestra.testing.puppet import Cue
from tests.agents.conftest import PuppetServer, Stage, serving
from tests.agents.programs import CLAUDE_CODE, CODEX, AgentProgram, tool_call

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

CONTEXT = 26000  # Claude Code's first prompt has 21,500 of the puppet's tokens, Codex's 16,600
STEPS = ("one", "two", "three", "four", "five", "six", "seven")
AFTER = {CLAUDE_CODE.name: "I went on now", CODEX.name: "They worked later"}
ASKS = {CLAUDE_CODE.name: "detailed summary", CODEX.name: REQUEST[:29]}
"""What stands in a request for a summary: Claude Code's own, and ours."""


def steps(program: AgentProgram, tag: str, call: Callable[[str, str], str]) -> Iterator[Cue]:
    """A tool is called again and again, and says much. The next cue is not in a call, only in its result."""
    for when, then in pairwise((program.task, *(f"{tag}-{step}" for step in STEPS))):
        word = then.partition("-")[2]
        yield Cue(when=when, say=call(f"seq 100 400; echo {tag[0]}{word}-{word} | sed s/{tag[0]}{word}/{tag}/", word))


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PuppetServer]:
    script = [
        *steps(CLAUDE_CODE, "step", lambda run, word: tool_call("Bash", command=run, description=f"{word} then")),
        *steps(CODEX, "phase", lambda run, word: tool_call("exec_command", cmd=run)),
        Cue(when=ASKS[CLAUDE_CODE.name], say="<summary>One counted, all compacted-claude</summary>"),
        Cue(when=ASKS[CODEX.name], say="We went far, all compacted-codex"),
        Cue(when="compacted-claude", say=AFTER[CLAUDE_CODE.name]),
        Cue(when="compacted-codex", say=AFTER[CODEX.name]),
    ]
    with serving(script, tmp_path_factory.mktemp("small"), CONTEXT) as server:
        yield server


@pytest.mark.parametrize(
    ("program", "more"),
    [(CLAUDE_CODE, ()), (CODEX, ("-c", f"model_context_window={CONTEXT}"))],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_agent_compacts_and_goes_on(
    program: AgentProgram, more: tuple[str, ...], small_server: PuppetServer
) -> None:
    stage = Stage(small_server)
    with stage.register() as client, client.episode(stage.run) as episode:
        ran = program.run(episode, f"Please do {program.task}.", more)
        assert ran.done.status == 0, ran.said
        assert AFTER[program.name] in ran.done.text, ran.said
        episode.end(reward=1.0)
    turns = [turn for trace in stage.traces(stage.played()) for turn in trace["turns"]]
    answers = [turn["answers"][0]["content"] for turn in turns]
    assert any("compacted-" in str(answer) for answer in answers)
    assert AFTER[program.name] in answers
