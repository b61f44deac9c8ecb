"""A collection delivers every row once, whatever agents do, and goes on where it was."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from palestra.environments.gym.directory import ServerDirectory
from palestra.environments.gym.errors import NoGym, UnknownAgent
from palestra.gym.collect.aggregating import aggregated, aggregated_here
from palestra.gym.collect.collection import CollectionRequest, CollectionStatus, collect, delivered
from palestra.gym.collect.files import JsonLinesFile, OutputFiles, read_lines
from palestra.gym.collect.playing import RowPlayer
from palestra.gym.collect.rows import Expansion, key_of
from palestra.gym.errors import CollectError
from palestra.rollouts.gym import row_calls
from palestra.rollouts.gym.row_calls import RetryPolicy
from palestra.util.backoff import Backoff
from tests.gym.collect.scripted import ScriptedGym, result_of, right, run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_calls, "BACKOFF", Backoff(0.01, 0.01))


@pytest.fixture
def gym() -> ScriptedGym:
    return ScriptedGym()


def wanted(folder: Path, count: int = 6, **more: Any) -> CollectionRequest:
    rows = [{"responses_create_params": {"input": f"task {at}"}, "worth": at % 2} for at in range(count)]
    path = folder / "in.jsonl"
    path.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in rows))
    expansion = more.pop("expansion", Expansion(agent="player", repeats=2))
    return CollectionRequest(input=path, output=folder / "out.jsonl", expansion=expansion, **more)


async def collected(
    gym: ScriptedGym, what: CollectionRequest, told: Callable[[CollectionStatus], None] = lambda _: None
) -> CollectionStatus:
    async with gym.serving() as client:
        directory = await ServerDirectory.of_head(client, gym.url)
        return await collect(what, RowPlayer(client, directory, what.patience), await directory.settings(), told)


def keys(path: Path) -> list[tuple[int, int]]:
    return [key_of(one) for one in read_lines(path)]


ALL = [(task, rollout) for task in range(6) for rollout in range(2)]


def test_every_row_comes_back_once_labelled_and_in_the_order_it_finished(tmp_path: Path, gym: ScriptedGym) -> None:
    async def later_first(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        await asyncio.sleep(0.05 * (6 - row["_ng_task_index"]))
        return await right(row, attempt)

    gym.reply = later_first
    standing = run(collected(gym, wanted(tmp_path)))
    found = keys(tmp_path / "out.jsonl")
    assert sorted(found) == ALL
    assert found != ALL
    assert (standing.done, standing.failed, standing.reward) == (12, 0, 0.5)
    first = delivered(tmp_path / "out.jsonl")[0]
    assert first["agent_ref"] == {"name": "player"}
    files = OutputFiles(tmp_path / "out.jsonl")
    assert keys(files.inputs) == ALL
    assert files.failures.read_bytes() == b""


def test_no_more_rows_than_asked_for_run_at_a_time(tmp_path: Path, gym: ScriptedGym) -> None:
    async def slow(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        return await right(row, attempt)

    gym.reply = slow
    run(collected(gym, wanted(tmp_path, concurrency=3)))
    assert gym.most_running == 3


def test_a_failing_row_is_tried_again_and_then_a_record(tmp_path: Path, gym: ScriptedGym) -> None:
    async def failing(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        task = row["_ng_task_index"]
        if task == 1 or (task == 2 and attempt == 0):
            return web.json_response("RuntimeError('no')", status=500)
        if task == 3:
            return web.json_response({"detail": "bad row"}, status=422)
        return await right(row, attempt)

    gym.reply = failing
    standing = run(collected(gym, wanted(tmp_path)))
    assert (standing.done, standing.failed, standing.attempts_failed) == (8, 4, 2 * 3 + 2 + 2)
    assert standing.classes == {"agent_error": 8, "row_refused": 2}
    failures = list(read_lines(OutputFiles(tmp_path / "out.jsonl").failures))
    assert {one["status"] for one in failures if one["_ng_task_index"] == 3} == {422}
    assert all(one["_ng_failure_terminal"] for one in failures if one["_ng_task_index"] == 3)
    assert sorted(one.get("_ng_attempt_index", 0) for one in failures if one["_ng_task_index"] == 1) == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    assert [one["_ng_attempt_index"] for one in read_lines(tmp_path / "out.jsonl") if one["_ng_task_index"] == 2] == [
        1,
        1,
    ]


def test_an_agent_says_what_becomes_of_its_answer(tmp_path: Path, gym: ScriptedGym) -> None:
    async def telling(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        said = {
            0: {"_ng_failure_class": "judge_failed"},
            1: {"_ng_failure_class": "odd", "_ng_failure_terminal": True},
            2: {"_ng_no_persist": True},
        }
        return web.json_response(result_of(row) | said.get(row["_ng_task_index"], {}))

    gym.reply = telling
    run(collected(gym, wanted(tmp_path, expansion=Expansion(agent="player"))))
    assert sorted(gym.asked.values()) == [1, 1, 1, 1, 1, 3]
    assert sorted(task for task, _ in keys(tmp_path / "out.jsonl")) == [3, 4, 5]
    failed = [one["_ng_failure_class"] for one in read_lines(OutputFiles(tmp_path / "out.jsonl").failures)]
    assert sorted(failed) == ["judge_failed"] * 3 + ["odd"]


def test_garbage_lost_connections_and_silence_are_failures_of_a_row(tmp_path: Path, gym: ScriptedGym) -> None:
    async def broken(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        match row["_ng_task_index"]:
            case 0:
                return web.Response(body=b"<html>")
            case 1 if attempt < 4:
                cut_short = web.StreamResponse(headers={"Content-Length": "999"})
                cut_short.force_close()
                return cut_short
            case 2:
                await asyncio.sleep(60)
        return await right(row, attempt)

    gym.reply = broken
    patience = RetryPolicy(attempts=2, run_limit_s=1.0)
    standing = run(collected(gym, wanted(tmp_path, expansion=Expansion(agent="player"), patience=patience)))
    assert standing.done == 4
    assert standing.classes["bad_answer"] == 2
    assert standing.classes["timeout_exceeded"] == 2
    assert standing.classes["server_died"] == 4, "those that went with their server have tries of their own"


def test_resume_plays_only_what_is_open(tmp_path: Path, gym: ScriptedGym) -> None:
    async def half(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        return await right(row, attempt) if row["_ng_task_index"] < 3 else web.json_response("no", status=500)

    gym.reply = half
    what = wanted(tmp_path, patience=RetryPolicy(attempts=1))
    run(collected(gym, what))
    gym.reply = right
    gym.asked.clear()
    again = wanted(tmp_path, resume=True, patience=RetryPolicy(attempts=3))
    standing = run(collected(gym, again))
    assert sorted(gym.asked) == [key for key in ALL if key[0] >= 3]
    assert (standing.done, standing.earlier) == (12, 6)
    assert standing.reward == 0.5
    assert sorted(keys(tmp_path / "out.jsonl")) == ALL
    gym.asked.clear()
    assert run(collected(gym, again)).done == 12
    assert not gym.asked


def test_a_resume_with_other_rows_or_servers_says_what_changed(tmp_path: Path, gym: ScriptedGym) -> None:
    run(collected(gym, wanted(tmp_path)))
    with pytest.raises(CollectError, match=r"the rows \(then 12, now 14\)"):
        run(collected(gym, wanted(tmp_path, count=7, resume=True)))

    async def another_gym(request: web.Request) -> web.StreamResponse:
        return web.json_response("player: {responses_api_agents: {simple_agent: {max_steps: 4}}}")

    gym._settings = another_gym
    with pytest.raises(CollectError, match="server player"):
        run(collected(gym, wanted(tmp_path, resume=True)))
    assert run(collected(gym, wanted(tmp_path, resume=True, resume_changed=True))).done == 12


def test_an_output_that_is_there_is_not_lost_by_accident(tmp_path: Path, gym: ScriptedGym) -> None:
    run(collected(gym, wanted(tmp_path)))
    with pytest.raises(CollectError, match="--resume, or replace it with --overwrite"):
        run(collected(gym, wanted(tmp_path)))
    run(collected(gym, wanted(tmp_path, count=2, overwrite=True)))
    assert len(keys(tmp_path / "out.jsonl")) == 4


def test_a_half_written_line_is_played_again(tmp_path: Path, gym: ScriptedGym) -> None:
    run(collected(gym, wanted(tmp_path)))
    path = tmp_path / "out.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    gym.asked.clear()
    run(collected(gym, wanted(tmp_path, resume=True)))
    assert sum(gym.asked.values()) == 1
    assert sorted(keys(path)) == ALL


def test_a_full_disk_ends_it_with_whole_lines_and_it_goes_on_later(tmp_path: Path, gym: ScriptedGym) -> None:
    what = wanted(tmp_path, concurrency=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_700, hard))  # the inputs fit, some results do
    try:
        with pytest.raises(CollectError, match="continue with --resume"):
            run(collected(gym, what))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    before = keys(tmp_path / "out.jsonl")
    assert 0 < len(before) < 12
    run(collected(gym, wanted(tmp_path, resume=True)))
    assert sorted(keys(tmp_path / "out.jsonl")) == ALL


def test_two_collections_do_not_share_an_output(tmp_path: Path) -> None:
    with JsonLinesFile(tmp_path / "x.jsonl"), pytest.raises(CollectError, match="another collection"):
        JsonLinesFile(tmp_path / "x.jsonl")


def test_overwriting_does_not_rob_a_collection_that_is_writing(tmp_path: Path, gym: ScriptedGym) -> None:
    what = wanted(tmp_path, overwrite=True)
    with JsonLinesFile(what.output) as running:
        running.append({"_ng_task_index": 0, "_ng_rollout_index": 0})
        OutputFiles(what.output).inputs.write_text("{}\n")
        with pytest.raises(CollectError, match="another collection"):
            run(collected(gym, what))
        running.append({"_ng_task_index": 0, "_ng_rollout_index": 1})
    assert keys(what.output) == [(0, 0), (0, 1)]
    assert OutputFiles(what.output).inputs.read_text() == "{}\n"


def test_an_answer_nobody_can_use_is_its_rows_failure(tmp_path: Path, gym: ScriptedGym) -> None:
    deep = b"[" * 500 + b"]" * 500
    answers = {
        0: b'{"reward": 1.0, "odd": ' + deep + b"}",
        1: b'{"_ng_failure_class": "odd", "_ng_failure_terminal": true, "told": ' + deep + b"}",
        2: b"{}",
        3: b'{"reward": "much"}',
    }

    async def odd(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        answer = answers.get(row["_ng_task_index"])
        return web.Response(body=answer) if answer else await right(row, attempt)

    gym.reply = odd
    what = wanted(tmp_path, expansion=Expansion(agent="player"), patience=RetryPolicy(attempts=2))
    standing = run(collected(gym, what))
    assert (standing.done, standing.failed) == (2, 4)
    failed = [
        (one["_ng_task_index"], one["_ng_failure_class"]) for one in read_lines(OutputFiles(what.output).failures)
    ]
    unusable = [(task, "bad_answer") for task in (0, 2, 2, 3, 3)]
    assert sorted(failed) == sorted([*unusable, (1, "odd")])


def test_a_row_nobody_can_send_is_named(tmp_path: Path, gym: ScriptedGym) -> None:
    what = wanted(tmp_path)
    what.input.write_bytes(b'{"responses_create_params": {"input": "x"}, "odd": ' + b"[" * 500 + b"]" * 500 + b"}\n")
    with pytest.raises(CollectError, match="task 0 cannot be sent"):
        run(collected(gym, what))


def test_a_cancelled_collection_leaves_whole_lines(tmp_path: Path, gym: ScriptedGym) -> None:
    async def some(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        if row["_ng_task_index"] > 2:
            await asyncio.sleep(60)
        return await right(row, attempt)

    def noted(standing: CollectionStatus) -> None:
        if standing.done == 6:
            all_but_the_stuck.set()

    async def cancelled() -> None:
        task = asyncio.create_task(collected(gym, wanted(tmp_path), noted))
        await all_but_the_stuck.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    gym.reply = some
    all_but_the_stuck = asyncio.Event()
    run(cancelled())
    assert sorted(keys(tmp_path / "out.jsonl")) == [key for key in ALL if key[0] <= 2]


def test_a_server_that_is_away_is_waited_for_and_asked_where_it_is_now(tmp_path: Path, gym: ScriptedGym) -> None:
    async def away() -> CollectionStatus:
        async with gym.serving() as client:
            directory = await ServerDirectory.of_head(client, gym.url)
            directory.urls["player"] = "http://127.0.0.1:1"
            what = wanted(tmp_path)
            return await collect(what, RowPlayer(client, directory, what.patience), {})

    assert run(away()).done == 12


def test_an_agent_that_is_not_there_is_told_with_the_nearest_name(tmp_path: Path, gym: ScriptedGym) -> None:
    run(collected(gym, wanted(tmp_path)))
    with pytest.raises(UnknownAgent, match="did you mean player"):
        run(collected(gym, wanted(tmp_path, overwrite=True, expansion=Expansion(agent="plyer"))))
    assert sorted(keys(tmp_path / "out.jsonl")) == ALL, "nothing is overwritten by what cannot begin"


def test_no_gym_at_all_says_how_to_start_one() -> None:
    async def nobody() -> None:
        async with ScriptedGym().serving() as client:
            await ServerDirectory.of_head(client, "http://127.0.0.1:1")

    with pytest.raises(NoGym, match="palestra gym run"):
        run(nobody())


def test_agents_aggregate_light_rows(tmp_path: Path, gym: ScriptedGym) -> None:
    async def metrics() -> list[dict[str, Any]]:
        async with gym.serving() as client:
            directory = await ServerDirectory.of_head(client, gym.url)
            return await aggregated(delivered(tmp_path / "out.jsonl"), directory, client)

    run(collected(gym, wanted(tmp_path)))
    entry = run(metrics())[0]
    assert entry["agent_ref"] == {"name": "player"}
    assert entry["agent_metrics"] == {"count": 12, "heavy": False}
    here = aggregated_here(delivered(tmp_path / "out.jsonl"))[0]
    assert here["key_metrics"] == {"mean/reward": 0.5, "mean/output_tokens": 3.0}
