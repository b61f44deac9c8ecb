"""Forks on the pages: beside the rollout that they were forked from, and why there are none."""

from __future__ import annotations

from palestra.runs.writer import RunFolder
from palestra.types.rollouts import RolloutStop
from tests.training.records import group_of, make_rollout, make_turn


def test_pages_show_what_a_fork_was_forked_from(root, open_client):
    whole = make_rollout("g9-0", 1.0, [make_turn(), make_turn(observation=1)])
    fork = make_rollout("g9-0", 0.0, fork_turn=1, stop=RolloutStop.DONE)
    fork.id = "g9-0.t2.1"
    whole.forks.append(fork)
    refused = make_rollout("g9-1", 0.0, not_forked="Diary has a close of its own")
    with RunFolder.open(root / "first") as run:
        run.write_rollouts(9, [group_of("g9", [whole, refused])])
    client = open_client(root)

    def page(rollout: str) -> str:
        answer = client.get("/runs/first/rollout", params={"part": "rollouts", "step": 9, "id": rollout})
        assert answer.status_code == 200, answer.text
        return answer.text

    assert '&amp;id=g9-0">g9-0</a>, from turn 2 on' in page("g9-0.t2.1")
    assert "<dt>forks</dt><dd>1</dd>" in page("g9-0")
    assert 'class="sibling fork"' in page("g9-0")
    assert "Diary has a close of its own" in page("g9-1")
    listed = client.get("/api/v1/runs/first/rollouts", params={"step": 9}).json()
    (group,) = listed["groups"]
    assert group["mean"] == 0.5
    assert len(group["rollouts"]) == 3
    answer = client.get("/runs/first/rollouts", params={"step": 9})
    assert "dot" in answer.text
    assert " fork" in answer.text
