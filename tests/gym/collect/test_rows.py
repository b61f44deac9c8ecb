"""Rows become rollouts the same way every time."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest

from palestra.gym.collect.rows import Expansion, PromptFile, expanded, key_of, read_rows
from palestra.gym.errors import CollectError


def row(text: str = "hi", **more: object) -> dict:
    return {"responses_create_params": {"input": text}, **more}


def lines(*rows: dict) -> list[tuple[bytes, dict]]:
    return [(orjson.dumps(one), one) for one in rows]


AGENT = Expansion(agent="player")


def test_equal_lines_are_one_task_and_repeats_stand_together() -> None:
    made = expanded(lines(row("a"), row("b"), row("a")), Expansion(agent="player", repeats=2))
    assert [key_of(one) for one in made] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert [one["responses_create_params"]["input"] for one in made] == ["a"] * 4 + ["b"] * 2


def test_a_row_keeps_its_own_agent_and_index() -> None:
    named = row("a", agent_ref={"name": "other"}, _ng_task_index=7)
    made = expanded(lines(named, row("b", _ng_task_index=2)), AGENT)
    assert [(one["agent_ref"]["name"], one["_ng_task_index"]) for one in made] == [("player", 2), ("other", 7)]
    with pytest.raises(CollectError, match="give it to all rows, or to none"):
        expanded(lines(named, row("b")), AGENT)


def test_an_agent_that_the_rows_overrule_is_told(caplog: pytest.LogCaptureFixture) -> None:
    expanded(lines(row("a", agent_ref={"name": "other"}), row("b")), AGENT)
    (note,) = [one.getMessage() for one in caplog.records]
    assert note.startswith("agent 'player' plays rows that name no agent, but 1 of 2 rows name one (other)")
    caplog.clear()
    expanded(lines(row("a", agent_ref={"name": "other"})), Expansion())
    assert not caplog.records


def test_overrides_are_shallow_and_seeds_count_repeats() -> None:
    given = row("a")
    given["responses_create_params"] |= {"temperature": 0.1, "metadata": {"extra_body": '{"top_k": 5}'}}
    made = expanded(lines(given), Expansion(agent="p", repeats=2, seeds=True, overrides={"temperature": 0.7}))
    assert [one["responses_create_params"]["temperature"] for one in made] == [0.7, 0.7]
    bodies = [json.loads(one["responses_create_params"]["metadata"]["extra_body"]) for one in made]
    assert bodies == [{"top_k": 5, "seed": 0}, {"top_k": 5, "seed": 1}]
    assert given["responses_create_params"]["temperature"] == 0.1, "the row that was given is not changed"


def test_repeats_by_agent_need_every_agent_or_a_default() -> None:
    rows = lines(row("a"), row("b", agent_ref={"name": "other"}))
    made = expanded(rows, Expansion(agent="player", repeats={"player": 3, "_default": 1}))
    assert [key_of(one) for one in made] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    with pytest.raises(CollectError, match="no number for agent other"):
        expanded(rows, Expansion(agent="player", repeats={"player": 3}))


def test_shards_share_nothing_and_miss_nothing() -> None:
    rows = lines(*(row(str(at)) for at in range(10)))
    shards = [expanded(rows, Expansion(agent="p", repeats=2, shard=at, shards=3)) for at in range(3)]
    keys = [key_of(one) for shard in shards for one in shard]
    assert sorted(keys) == [key_of(one) for one in expanded(rows, Expansion(agent="p", repeats=2))]
    assert len({task for shard in shards[:1] for task, _ in map(key_of, shard)}) == 4


def test_a_limit_comes_first() -> None:
    assert len(expanded(lines(row("a"), row("b")), Expansion(agent="p", limit=1, repeats=3))) == 3


def test_rows_without_an_agent_are_all_named() -> None:
    with pytest.raises(CollectError, match=r"2 rows name no agent \(rows 1, 3\)"):
        expanded(lines(row("a"), row("b", agent_ref={"name": "x"}), row("c")), Expansion())


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"agent_ref": {"name": "x"}}, "row 1 has no responses_create_params.input"),
        (row("a", _ng_rollout_id="../x"), "_ng_rollout_id"),
        (row("a", _ng_rollout_id="x\n"), "_ng_rollout_id"),
        (row("a", _ng_rollout_id="x" * 300), "at most 200"),
        (row("a", _ng_task_index="x"), "whole number"),
    ],
)
def test_a_row_that_cannot_be_played_is_named(bad: dict, words: str) -> None:
    with pytest.raises(CollectError, match=words):
        expanded(lines(bad), AGENT)


@pytest.mark.parametrize("reference", ["x", ["x"], {"name": 5}, 7])
def test_what_is_no_reference_names_no_agent(reference: object) -> None:
    with pytest.raises(CollectError, match="1 rows name no agent"):
        expanded(lines(row("a", agent_ref=reference)), Expansion())
    assert expanded(lines(row("a", agent_ref=reference)), AGENT)[0]["agent_ref"] == {"name": AGENT.agent}


@pytest.mark.parametrize("metadata", [{"extra_body": "{"}, {"extra_body": "[1]"}, "x"])
def test_seeds_need_a_body_they_can_be_put_into(metadata: object) -> None:
    bad = row("a")
    bad["responses_create_params"]["metadata"] = metadata
    with pytest.raises(CollectError, match=r"task 0: responses_create_params\.metadata\.extra_body"):
        expanded(lines(bad), Expansion(agent="p", seeds=True))


def test_a_file_that_is_no_json_lines_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n[1]\n')
    with pytest.raises(CollectError, match="line 3: a row must be an object, but this is a list"):
        list(read_rows(path))
    path.write_text('{"a": 1}\n{"a"\n')
    with pytest.raises(CollectError, match="line 2: not valid JSON"):
        list(read_rows(path))
    with pytest.raises(CollectError, match="No such file"):
        list(read_rows(tmp_path / "y.jsonl"))


def test_a_prompt_is_filled_from_the_row(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text('system: "be {{brief}}"\nuser: "what is {question}?"\n')
    prompt = PromptFile.read(path)
    made = expanded(
        lines({"question": "love", "responses_create_params": {"tools": []}}), Expansion(agent="p", prompt=prompt)
    )
    assert made[0]["responses_create_params"] == {
        "tools": [],
        "input": [{"role": "system", "content": "be {brief}"}, {"role": "user", "content": "what is love?"}],
    }
    with pytest.raises(CollectError, match="use one of them"):
        prompt.applied(row("a"))
    with pytest.raises(CollectError, match="'question' is not among the row's fields"):
        prompt.applied({"x": 1})
    with pytest.raises(CollectError, match="must be an object, found list"):
        prompt.applied({"question": "x", "responses_create_params": [1]})
    path.write_text('user: "{question:>9}"\n')
    with pytest.raises(CollectError, match="cannot be filled in"):
        PromptFile.read(path).applied({"question": [1]})
    path.write_text("usr: x\n")
    with pytest.raises(CollectError, match=r"p\.yaml"):
        PromptFile.read(path)
