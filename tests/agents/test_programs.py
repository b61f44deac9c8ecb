"""Command-line agents play episodes, unmodified: they call a tool, write a file, and end."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from palestra.testing.puppet import Cue
from tests.agents.conftest import Stage, serving
from tests.agents.programs import CLAUDE_CODE, PROGRAMS, AgentProgram, tool_call

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_an_agent_plays_an_episode_token_for_token(program: AgentProgram, stage: Stage) -> None:
    with stage.register() as client, client.episode(stage.run) as episode:
        ran = program.run(episode, f"Please do {program.task}.")
        assert ran.done.status == 0, ran.said
        assert ran.written == program.word, ran.said
        key = episode.api_key
        assert episode.end(reward=0.5).is_kept
    played = stage.played()
    assert played["info"]["result"]["reward"] == 0.5
    traces = stage.traces(played)
    assert tuple(one["agent"] for one in played["trajectories"]) == program.agents
    own = played["trajectories"][0]
    check_main_trace(program, own, next(trace for trace in traces if trace["id"] == own["trace_id"]))
    assert all(turn["client"].startswith(program.client) for trace in traces for turn in trace["turns"])
    shown = [str(traces), stage.timeline(played), stage.server.said(), ran.said]
    assert not any(key in text for text in shown)


def check_main_trace(program: AgentProgram, own: dict[str, Any], trace: dict[str, Any]) -> None:
    """The trajectory that is trained on is what was read and sampled, turn after turn."""
    turns = trace["turns"]
    assert [turn["match"] for turn in turns] == [program.begins, *["continued"] * (program.turns - 1)]
    assert {turn["route"] for turn in turns} == {program.route}
    assert {tuple(turn["ignored"]) for turn in turns} == {program.ignored}
    for before, after in pairwise(turns):
        whole = before["prompt"] + before["samples"][0]["tokens"]
        assert after["prompt"][: len(whole)] == whole
    sampled = [turn["samples"][0] for turn in turns]
    assert own["tokens"] == turns[-1]["prompt"] + sampled[-1]["tokens"]
    marked = [token for token, mask in zip(own["tokens"], own["loss_mask"], strict=True) if mask]
    assert marked == [token for sample in sampled for token in sample["tokens"]]
    logprobs = [value for value, mask in zip(own["logprobs"], own["loss_mask"], strict=True) if mask]
    assert logprobs == pytest.approx([value for sample in sampled for value in sample["logprobs"]])
    assert program.word in str(turns[0]["answers"])


SUB_AGENT = [
    Cue(
        when="task-delegate",
        say=tool_call("Agent", description="help", prompt="Please do helper-work.", subagent_type="general-purpose"),
    ),
    Cue(when="helper-work", say=tool_call("Bash", command="echo helped-well > out.txt", description="a help")),
    Cue(when="helped-well", say="Helper has finished-helping"),
    Cue(when="finished-helping", say="Everybody is through"),
]


def test_a_sub_agent_is_a_branch_of_its_own(tmp_path: Path) -> None:
    with serving(SUB_AGENT, tmp_path / "server", 65536) as server:
        stage = Stage(server)
        with stage.register() as client, client.episode(stage.run) as episode:
            ran = CLAUDE_CODE.run(episode, "Please do task-delegate.")
            assert "Everybody is through" in ran.done.text, ran.said
            assert ran.written == "helped-well"
            assert episode.end(reward=1.0, agent_rewards={"subagent": 0.25}).is_kept
        played = stage.played()
        assert [one["agent"] for one in played["trajectories"]] == ["", "subagent"]
        assert all(len(trace["turns"]) > 1 for trace in stage.traces(played))
