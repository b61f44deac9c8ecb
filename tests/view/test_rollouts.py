"""From a step to its groups, to a rollout, to a token."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from palestra.runs.reader import Part, RunReader
from palestra.runs.record_files import write_records
from palestra.runs.writer import RunFolder
from palestra.training.batches.grpo_batch import build_batch
from palestra.view.rollouts.messages import PieceKind, show_messages
from palestra.view.rollouts.rollout_list import MAX_SCANNED_BYTES, Order, RolloutQuery, list_rollouts
from palestra.view.rollouts.step_cache import StepCache
from palestra.view.runs.catalogue import Catalogue
from tests.training.records import group_of, make_config, make_group, make_rollout
from tests.view.folders import HOSTILE, write_run

API = "/api/v1/runs/first"


def rollouts(client, **query):
    answer = client.get(f"{API}/rollouts", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_groups_have_their_rewards_spread_and_stops(client):
    found = rollouts(client, step=2, order="played")
    assert (found["total"], found["total_groups"], found["steps"]) == (12, 3, [1, 2, 3, 4])
    first, second, third = found["groups"]
    assert [one["reward"] for one in first["rollouts"]] == [1.0, 0.0, 0.0, 0.0]
    assert (first["mean"], round(first["spread"], 3), first["stops"]) == (0.25, 0.433, {"done": 4})
    assert (second["spread"], second["surprise"]) == (0.0, 0.0)
    assert third["stops"] == {"done": 3, "env_failed": 1}
    assert first["prompt"].startswith("What is 2 + 2?")
    assert "messages" not in first["rollouts"][0]


def test_the_most_surprising_group_comes_first(client):
    def first_to_last(order):
        return [group["id"] for group in rollouts(client, step=1, order=order)["groups"]]

    assert first_to_last("surprising") == ["g1a", "g1c", "g1b"]
    assert first_to_last("best") == ["g1b", "g1c", "g1a"]
    assert first_to_last("worst") == ["g1a", "g1c", "g1b"]


def test_conditions_are_those_of_the_command(client):
    assert rollouts(client, step=1, where="reward>=1 and group='g1a'")["total"] == 1
    assert rollouts(client, step=1, where="metrics.parse_error>0")["total"] == 3
    answer = client.get(f"{API}/rollouts", params={"where": "rewrd<1"})
    assert answer.status_code == 400
    assert "did you mean 'reward'?" in answer.json()["error"]["message"]


def test_each_facet_and_each_bar_chooses_as_many_as_it_says(client):
    for where in ("", "tokens>0 or reward=1"):
        found = rollouts(client, step=1, where=where)
        assert {facet["name"] for facet in found["facets"]} == {"stop", "error", "used", "tokens"}
        values = [value for facet in found["facets"] for value in facet["values"]]
        for value in (*values, *found["rewards"]):
            assert rollouts(client, step=1, where=value["where"])["total"] == value["count"], value


def test_without_a_step_all_are_searched_newest_first(client):
    found = rollouts(client, order="played")
    assert (found["total"], found["is_cut"]) == (48, False)
    assert [group["step"] for group in found["groups"]][:3] == [4, 4, 4]
    assert rollouts(client, part="eval")["total"] == 2


def test_a_search_ends_where_long_texts_would_fill_the_memory(tmp_path):
    with RunFolder.create(tmp_path, "first", make_config(steps=2)) as run:
        for step in (1, 2):
            long = [make_rollout(f"g{step}-{i}", 0.0, error="x" * (MAX_SCANNED_BYTES // 2)) for i in range(2)]
            run.write_rollouts(step, [group_of(f"g{step}", long)])
    found = list_rollouts(Catalogue(tmp_path), "first", RolloutQuery(where="reward=0"))
    assert ([group.step for group in found.groups], found.is_cut) == ([2], True)


def test_steps_are_kept_by_their_bytes_until_their_files_change(tmp_path):
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(b"1234")
    cache, made = StepCache(10), []

    def make(file):
        made.append(file.name)
        return file.read_bytes()

    for file in (files[0], files[1], files[0], files[2]):  # the second leaves
        assert cache.get(file, make) == b"1234"
        assert cache.size_bytes <= 10
    assert [cache.get(file, make) for file in (files[0], files[2], files[1])] == [b"1234"] * 3
    assert made == ["a", "b", "c", "b"]
    files[1].write_bytes(b"12345678901")  # more than may be kept
    assert (cache.get(files[1], make), cache.size_bytes) == (b"12345678901", 4)


MISSING = object()


def changed(record: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """The record with another value, or without the field."""
    return {name: value if name == field else one for name, one in record.items() if (name, value) != (field, MISSING)}


EVERY_DAY: tuple[Any, ...] = (MISSING, {"odd": {"a": [1]}})
ODD: tuple[Any, ...] = (None, "odd", True, 10**400, ["odd", None])
odd_values = pytest.mark.parametrize(
    "value",
    [*EVERY_DAY, *(pytest.param(value, marks=pytest.mark.slow) for value in ODD)],
    ids=lambda value: "missing" if value is MISSING else str(value)[:10],
)


@odd_values
def test_records_of_other_versions_are_shown_as_far_as_they_say_something(tmp_path, open_client, value):
    """Each rollout has another field that is not there, or is not what it is today."""
    write_run(tmp_path, steps=1)
    run = RunReader(tmp_path / "first")
    whole = run.read_rollouts(1)[0]
    records = []
    for at, field in enumerate(name for name in whole if name not in ("id", "step")):
        records.append(changed({**whole, "id": f"r-{at}"}, field, value))
    write_records(run.step_file(Part.ROLLOUTS, 1), records)
    client = open_client(tmp_path)
    assert client.get("/runs/first/rollouts").status_code == 200
    for order in Order:
        assert rollouts(client, order=order)["total"] == len(records)
    for record in records:
        for path in (f"{API}/rollout", "/runs/first/rollout", f"{API}/test-case"):
            answer = client.get(path, params={"step": 1, "id": record["id"]})
            assert answer.status_code == 200, (path, record)
    assert client.get(f"{API}/rollout", params={"step": 1, "id": "r-0"}).json()["record"] == records[0]


@odd_values
def test_tokens_of_other_versions_are_shown_or_said_to_be_unreadable(tmp_path, open_client, value):
    write_run(tmp_path, steps=1)
    run = RunReader(tmp_path / "first")
    whole = run.read_tokens(1)[0]
    turn = whole["turns"][0]
    odd = [changed(whole, field, value) for field in whole if field != "id"]
    odd += [{**whole, "turns": [changed(turn, field, value), turn]} for field in turn]
    records = [{**record, "id": f"r-{at}"} for at, record in enumerate(odd)]
    write_records(run.step_file(Part.TOKENS, 1), records)
    client = open_client(tmp_path)
    for record in records:
        answer = client.get(f"{API}/tokens", params={"step": 1, "id": record["id"]})
        assert answer.status_code in (200, 422), record
        if answer.status_code == 200:
            columns = [one for one in answer.json().values() if isinstance(one, list)]
            assert len({len(column) for column in columns}) == 1


@pytest.mark.parametrize("rewards", [[i / 40 for i in range(41)], [i / 3 for i in range(41)], [1e15 / 7, *range(40)]])
def test_many_rewards_are_put_into_equal_bins(tmp_path, open_client, rewards):
    config = make_config(steps=1)
    with RunFolder.create(tmp_path, "first", config) as run:
        groups = [make_group("g", rewards)]
        run.write_rollouts(1, groups, build_batch(groups, config).sequences)
    client = open_client(tmp_path)
    bins = rollouts(client, step=1)["rewards"]
    assert (len(bins), sum(one["count"] for one in bins)) == (12, 41)
    for one in bins:
        assert rollouts(client, step=1, where=one["where"])["total"] == one["count"]


def test_a_bar_finds_rewards_that_no_short_number_is_equal_to(tmp_path, open_client):
    config = make_config(steps=1)
    with RunFolder.create(tmp_path, "first", config) as run:
        groups = [make_group("g", [1 / 3, 2 / 3, 1 / 3, -1 / 7])]
        run.write_rollouts(1, groups, build_batch(groups, config).sequences)
    client = open_client(tmp_path)
    for one in rollouts(client, step=1)["rewards"]:
        assert rollouts(client, step=1, where=one["where"])["total"] == one["count"]


def test_a_rollout_has_its_conversation_and_its_group(client):
    found = client.get(f"{API}/rollout", params={"step": 1, "id": "g1a-1"}).json()
    assert (found["record"]["reward"], found["previous"], found["next"]) == (0.0, "g1a-0", "g1a-2")
    assert [one["reward"] for one in found["siblings"]] == [1.0, 0.0, 0.0, 0.0]
    kinds = [[piece["kind"] for piece in message["pieces"]] for message in found["messages"]]
    assert kinds == [["text"], ["text"], ["reasoning", "text", "call"], ["result"], ["text"]]
    assert found["token_rows"] == ["g1a-1"]


def test_advantages_and_the_trainers_logprobs_and_entropies_are_kept_with_a_step(tmp_path, open_client):
    config = make_config(steps=1)
    with RunFolder.create(tmp_path, "first", config) as run:
        groups = [make_group("g", [1.0, 0.0])]
        sequences = build_batch(groups, config).sequences
        scored = [[-0.25] * (len(sequence.tokens) - 1) for sequence in sequences]
        entropies = [[0.5, math.nan, 1.23456][: len(one)] + [0.0] * (len(one) - 3) for one in scored]
        run.write_rollouts(1, groups, sequences, scored, entropies)
        assert sequences[0].advantages[-1] == 0.5 / 6, "divided by the tokens of the step"
        advantages = [(one["advantage"], one["advantage_divisor"]) for one in run.read_rollouts(1)]
        assert advantages == [(0.5, 6.0), (-0.5, 6.0)]
        run.write_rollouts(2, groups)
        assert {one["advantage"] for one in run.read_rollouts(2)} == {None}
    client = open_client(tmp_path)
    tokens = client.get(f"{API}/tokens", params={"step": 1, "id": "g-0"}).json()
    assert tokens["ids"] == [1, 2, 10, 11, 12]
    assert (tokens["advantages"], tokens["advantage_divisor"]) == ([None, None, 0.5, 0.5, 0.5], 6.0)
    page = client.get("/runs/first/rollout", params={"step": 1, "id": "g-0"}).text
    assert "<dd>0.5 " in page
    assert "divided by 6 in the loss" in page
    assert tokens["origins"] == [0, 0, 2, 2, 2]
    assert tokens["turns"] == [0, 0, 1, 1, 1]
    assert tokens["logprobs"] == [None, None, -0.5, -0.5, -0.5]
    assert tokens["trainer_logprobs"] == [None, None, -0.25, -0.25, -0.25]
    assert tokens["entropies"] == [None, None, None, 1.2346, 0.0]
    assert (tokens["texts"][0], tokens["has_texts"]) == ("<1>", False)


@pytest.mark.parametrize(
    "query",
    [
        {"step": 1, "id": "nobody"},
        {"step": 99, "id": "g1a-1"},
        {"step": 4, "id": "g1a-1"},
        {"part": "eval", "step": 1, "id": "e-0"},
    ],
)
def test_what_is_not_there_is_said(client, query):
    for path in (f"{API}/rollout", "/runs/first/rollout", f"{API}/tokens"):
        assert client.get(path, params=query).status_code == 404, path


def test_the_page_of_groups_leads_to_each_rollout(client):
    page = client.get("/runs/first/rollouts", params={"step": 1}).text
    links = re.findall(r'href="(rollout\?part=rollouts&amp;step=1&amp;id=[^"]+)"', page)
    assert len(links) == 12
    for link in links:
        assert client.get(f"/runs/first/{link.replace('&amp;', '&')}").status_code == 200
    assert "step 4" in client.get("/runs/first/rollouts").text  # the newest
    wrong = client.get("/runs/first/rollouts", params={"where": "reward <"})
    assert wrong.status_code == 400
    assert "is not a condition" in wrong.text


def test_two_rollouts_are_read_side_by_side(client):
    page = client.get("/runs/first/rollout", params={"step": 1, "id": "g1a-0", "beside": "g1a-1"}).text
    assert page.count('<section class="transcript"') == 2


def test_a_test_case_is_python_with_the_answers(client):
    text = client.get(f"{API}/test-case", params={"step": 1, "id": "g1a-0"}).text
    found: dict[str, object] = {}
    exec(text, found)  # noqa: S102 (our own text)
    assert (found["task"], found["reward"], found["answers"]) == ("t", 1.0, ["<think>easy</think>4", "4 0"])


@pytest.mark.parametrize("text", ["smile \U0001f642", "null, true", "a\u202eb\x00\n'''"])
def test_a_test_case_has_every_character(tmp_path, open_client, text):
    write_run(tmp_path, text=text)
    client = open_client(tmp_path)
    case = client.get(f"{API}/test-case", params={"step": 1, "id": "g1a-0"}).text
    found: dict[str, Any] = {}
    exec(case, found)  # noqa: S102 (our own text)
    assert found["answers"][-1] == f"{text} 0"
    assert found["messages"][1]["content"] == f"What is 2 + 2? {text}"
    assert "\u202e" not in case


def test_hostile_conversations_stay_text(tmp_path, open_client):
    write_run(tmp_path, text=HOSTILE)
    client = open_client(tmp_path)
    for page in (
        "rollouts?step=1",
        "rollouts?every=1",
        "rollout?step=1&id=g1a-0",
        "rollout?step=1&id=g1c-3&beside=g1a-1",
    ):
        shown = client.get(f"/runs/first/{page}").text
        assert "&lt;script&gt;" in shown
        assert not re.search(r"<script>|<img|\x1b|\u202e", shown), page


@pytest.mark.parametrize(
    "messages",
    [
        [None, 3, "text"],
        [{}],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}, {"text": "hi"}, 5]}],
        [{"role": "assistant", "content": "<think>never closed"}],
        [{"role": "assistant", "content": "<tool_call>{broken</tool_call><tool_call>[1]</tool_call>"}],
        [{"role": "assistant", "tool_calls": ["odd", {"function": {"name": "f", "arguments": "{}"}}]}],
        [{"role": "tool", "content": {"a": 1}, "name": "f"}],
        [{"role": "assistant", "content": f"<tool_call>{'[' * 100_000}</tool_call>"}],
    ],
)
def test_any_message_can_be_shown(messages):
    shown = show_messages(messages)
    assert len(shown) == sum(isinstance(one, dict) for one in messages)
    json.dumps([[piece.text for piece in one.pieces] for one in shown])


def test_only_who_calls_tools_has_calls():
    text = 'Call so: <tool_call>{"name": "count"}</tool_call>'
    system, assistant = show_messages([{"role": role, "content": text} for role in ("system", "assistant")])
    assert [piece.kind for piece in system.pieces] == [PieceKind.TEXT]
    assert [piece.kind for piece in assistant.pieces] == [PieceKind.TEXT, PieceKind.CALL]


def test_a_step_that_is_written_again_is_read_again(client, root):
    assert rollouts(client, step=1)["total"] == 12
    run = RunReader(root / "first")
    run.step_file(Part.ROLLOUTS, 1).unlink()
    with RunFolder.open(run.path) as again:
        again.write_rollouts(1, [make_group("new", [1.0])])
    assert rollouts(client, step=1)["total"] == 1
