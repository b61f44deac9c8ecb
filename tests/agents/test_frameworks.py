"""Agents made with frameworks from PyPI: a tool call and an answer each, captured token for token."""

from __future__ import annotations

import pytest

from tests.agents.conftest import Stage
from tests.agents.frameworks import FRAMEWORKS, Framework

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_a_framework_calls_a_tool_and_answers(framework: Framework, stage: Stage) -> None:
    with stage.register() as client, client.episode(stage.run) as episode:
        ran = framework.run(episode)
        assert ran.done.status == 0, ran.said
        assert framework.answer in ran.done.text, ran.said
        key = episode.api_key
        assert episode.end(reward=1.0).is_kept
    played = stage.played()
    turns = [turn for trace in stage.traces(played) for turn in trace["turns"]]
    assert {turn["route"] for turn in turns} == {framework.route}
    assert all(turn["client"] for turn in turns)
    assert sum(sum(one["loss_mask"]) for one in played["trajectories"]) == sum(
        len(turn["samples"][0]["tokens"]) for turn in turns
    )
    assert not any(key in text for text in (str(turns), stage.timeline(played), stage.server.said()))
