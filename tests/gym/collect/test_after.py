"""What is done with a collection afterwards: graded again, profiled, compared; and datasets put together before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from palestra.environments.gym.directory import ServerDirectory
from palestra.gym.collect.comparing import compare
from palestra.gym.collect.datasets import DatasetSplit, collate, datasets_of
from palestra.gym.collect.files import OutputFiles, read_lines
from palestra.gym.collect.pairing import indexed
from palestra.gym.collect.profiling import profile, save
from palestra.gym.collect.reverifying import Grader, ReverifyRequest, ReverifyStatus, reverify
from palestra.gym.errors import CollectError
from palestra.gym.records import GymConfig, ServerInstance, ServerKind
from tests.gym.collect.scripted import ScriptedGym, result_of, run


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in rows))
    return path


def row_of(task: int, rollout: int, **more: Any) -> dict[str, Any]:
    params = {"responses_create_params": {"input": f"task {task}"}}
    indices = {"_ng_task_index": task, "_ng_rollout_index": rollout, "agent_ref": {"name": "player"}}
    return {**params, **indices, **more}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The rollouts of 3 tasks, twice each, all worth 1, beside their inputs."""
    rows = [row_of(task, rollout, expected=task) for task in range(3) for rollout in range(2)]
    write(tmp_path / "out_materialized_inputs.jsonl", rows)
    return write(tmp_path / "out.jsonl", [row | result_of(row) | {"note": "kept"} for row in rows])


def regrading(stored: Path, **more: Any) -> ReverifyRequest:
    return ReverifyRequest(
        inputs=OutputFiles(stored).inputs, rollouts=stored, output=stored.with_name("new.jsonl"), **more
    )


async def regraded(gym: ScriptedGym, what: ReverifyRequest) -> ReverifyStatus:
    async with gym.serving() as client:
        directory = await ServerDirectory.of_head(client, gym.url)
        return await reverify(what, Grader(client, directory, await directory.settings()))


def test_stored_rollouts_are_graded_again_without_a_model(stored: Path) -> None:
    gym = ScriptedGym()
    gym.verify = lambda row: {"reward": float(row["expected"] == 1), "response": row["response"]}
    standing = run(regraded(gym, regrading(stored)))
    assert (standing.total, standing.done, standing.changed) == (6, 6, 4)
    found = indexed(stored.with_name("new.jsonl"))
    assert {key: one["reward"] for key, one in found.items()} == {
        (t, r): float(t == 1) for t in range(3) for r in (0, 1)
    }
    assert found[0, 0]["note"] == "kept"
    assert not gym.asked, "no agent was asked"


def test_what_a_server_cannot_grade_needs_force_and_is_marked(stored: Path) -> None:
    gym = ScriptedGym()
    gym.mode = "unsupported"
    with pytest.raises(CollectError, match="--any-verifier"):
        run(regraded(gym, regrading(stored)))
    run(regraded(gym, regrading(stored, force=True)))
    assert len(indexed(stored.with_name("unsafe_new.jsonl"))) == 6
    assert not stored.with_name("new.jsonl").exists()


def test_only_rollouts_whose_judge_failed_are_graded_and_the_rest_is_kept(stored: Path) -> None:
    rows = list(read_lines(stored))
    lost = {**rows[0], "reward": 0.0, "_ng_failure_class": "judge_failed"}
    other = {**rows[1], "_ng_failure_class": "run_failed"}
    write(stored, rows[2:])
    write(OutputFiles(stored).failures, [lost, lost, other])
    gym = ScriptedGym()
    standing = run(regraded(gym, regrading(stored, judge_failed_only=True)))
    assert (standing.kept, standing.done) == (4, 1)
    found = indexed(stored.with_name("new.jsonl"))
    assert found[0, 0]["reward"] == 0.5
    assert "_ng_failure_class" not in found[0, 0]
    assert (0, 1) not in found

    in_place = ReverifyRequest(
        inputs=OutputFiles(stored).inputs, rollouts=stored, output=stored, judge_failed_only=True, append=True
    )
    assert run(regraded(gym, in_place)).done == 1
    assert run(regraded(gym, in_place)).total == 0, "a second time there is nothing left"


def test_regrading_resumes_and_does_not_overwrite(stored: Path) -> None:
    gym = ScriptedGym()
    run(regraded(gym, regrading(stored, limit=2)))
    with pytest.raises(CollectError, match="--resume"):
        run(regraded(gym, regrading(stored)))
    assert run(regraded(gym, regrading(stored, resume=True))).done == 6
    assert len(indexed(stored.with_name("new.jsonl"))) == 6
    with pytest.raises(CollectError, match="is the file of the rollouts"):
        run(
            regraded(
                gym, ReverifyRequest(inputs=OutputFiles(stored).inputs, rollouts=stored, output=stored, overwrite=True)
            )
        )
    assert len(indexed(stored)) == 6


def test_a_profile_has_every_task_and_says_what_is_missing(stored: Path) -> None:
    rows = list(read_lines(stored))
    write(stored, [{**one, "reward": float(one["_ng_task_index"] == 1)} for one in rows[:-1]])
    inputs = OutputFiles(stored).inputs
    with pytest.raises(CollectError, match="1 rows have no result: 2:1"):
        profile(inputs, stored)
    made = profile(inputs, stored, partial=True)
    assert [task["mean/reward"] for task in made.tasks] == [0.0, 1.0, 0.0]
    assert [task["missing_num_rollouts"] for task in made.tasks] == [0, 0, 1]
    assert made.tasks[1]["sample"]["expected"] == 1
    assert made.agents[0]["pass@1/accuracy"] == pytest.approx(100 / 3)
    tasks, agents = save(made, stored)
    assert tasks.name == "out_reward_profiling.jsonl"
    assert agents.name == "out_agent_metrics.json"
    assert len(list(read_lines(tasks))) == 3


def test_results_of_another_collection_are_not_mixed_in(stored: Path) -> None:
    write(stored, [*read_lines(stored), row_of(9, 0)])
    with pytest.raises(CollectError, match=r"without a row in .*: 9:0"):
        profile(OutputFiles(stored).inputs, stored)
    write(stored, [row_of(0, 0), row_of(0, 0)])
    with pytest.raises(CollectError, match="twice"):
        profile(OutputFiles(stored).inputs, stored)


def test_a_comparison_says_what_changed_and_whether_it_is_clear(tmp_path: Path) -> None:
    before = write(tmp_path / "a.jsonl", [row_of(task, 0, reward=0.0) for task in range(20)])
    after = write(tmp_path / "b.jsonl", [row_of(task, 0, reward=float(task > 4)) for task in range(21)])
    found = compare(before, after)
    assert (found.tasks, found.only_after, found.difference, found.is_clear) == (20, 1, 0.75, True)
    assert len(found.better) == 15
    assert not found.worse
    same = compare(
        before, write(tmp_path / "c.jsonl", [row_of(task, 0, reward=float(task == 3)) for task in range(20)])
    )
    assert not same.is_clear
    with pytest.raises(CollectError, match="no task with 'speed' in common"):
        compare(before, after, "speed")


def config(folder: Path, datasets: list[dict[str, Any]]) -> GymConfig:
    agent = ServerInstance(
        name="player",
        kind=ServerKind.AGENT,
        implementation="simple_agent",
        settings={"datasets": datasets},
        host="h",
        port=1,
    )
    return GymConfig(servers={"player": agent}, settings={}, head_host="h", head_port=2, secret="s")


def test_datasets_are_collated_with_their_agent_and_repeats(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", [{"responses_create_params": {"input": "a b", "tools": []}, "level": 3, "kind": "x"}])
    entries = [
        {"name": "t", "type": "train", "jsonl_fpath": "t.jsonl", "num_repeats": 2},
        {"name": "e", "type": "example", "jsonl_fpath": "nowhere.jsonl"},
    ]
    found = datasets_of(config(tmp_path, entries), [DatasetSplit.TRAIN], lambda path: tmp_path / path)
    made = collate(found, tmp_path / "all")
    rows = list(read_lines(tmp_path / "all/train.jsonl"))
    assert [one["agent_ref"] for one in rows] == [{"type": "responses_api_agents", "name": "player"}] * 2
    assert made[0].statistics["Number of examples"] == 2
    assert made[0].statistics["level"]["Average"] == 3
    assert made[0].statistics["kind"] == {"unique_count": 1, "total_count": 2}

    write(tmp_path / "t.jsonl", [{"responses_create_params": {"input": "a b"}, "level": 4, "kind": "x"}])
    with pytest.raises(CollectError, match="level differ"):
        collate(found, tmp_path / "all")
    collate(found, tmp_path / "all", overwrite_statistics=True)


def test_datasets_that_are_not_there_or_not_playable_are_named(tmp_path: Path) -> None:
    entry = {"name": "t", "type": "train", "jsonl_fpath": "t.jsonl"}
    with pytest.raises(CollectError, match=r"do not exist: .*t\.jsonl"):
        datasets_of(config(tmp_path, [entry]), [DatasetSplit.TRAIN], lambda path: tmp_path / path)
    write(tmp_path / "t.jsonl", [{"responses_create_params": {"input": "a"}}, {"x": 1}])
    found = datasets_of(config(tmp_path, [entry]), [DatasetSplit.TRAIN], lambda path: tmp_path / path)
    with pytest.raises(CollectError, match="row 2: no responses_create_params"):
        collate(found, tmp_path / "all")
    with pytest.raises(CollectError, match="no agent lists a dataset of type validation"):
        datasets_of(config(tmp_path, [entry]), [DatasetSplit.VALIDATION], lambda path: tmp_path / path)
