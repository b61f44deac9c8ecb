from __future__ import annotations

import json
import time
from collections import Counter
from functools import cache
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.chat.tool_calls import ParsedCall, parse_tool_call
from palestra.environments.bundled import arithmetic, stockroom_tasks
from palestra.environments.bundled.arithmetic import Arithmetic, answer, is_held_out, problems, question
from palestra.environments.bundled.seeded_random import last_integer
from palestra.environments.bundled.stockroom import Stockroom
from palestra.environments.bundled.stockroom_tasks import ITEMS, SYSTEM, Kind, call_text
from palestra.types.rollouts import Task
from tests.properties import examples

CUPS = {"kind": "difference", "items": ["cups", "pens"], "stock": {"cups": 62, "pens": 25, "hats": 11}}
ATTACKS = [
    "",
    "<done>",
    "<done> <done>",
    "answer: see above <done>",
    " ".join(map(str, range(1000))) + " <done>",
    "9" * 10_000 + " <done>",
    "-" * 10_000 + "1e7 <done>",
    "<tool_call>" * 5_000,
    "<tool_call></tool_call>" * 5_000 + "<done>",
    "<tool_call>{<done>",
    '<tool_call>{"name": "count"}</tool_call>',
    '<tool_call>{"name": "count", "arguments": {"item": ' + "9" * 5_000 + "}}</tool_call>",
    '<tool_call>{"name": "count", "arguments": {"item": ' + "9" * 4_000 + "}}</tool_call>",
    '<tool_call>{"name": "count", "arguments": {"item": "' + "x" * 10_000 + '"}}</tool_call>',
    '<tool_call>{"name": "count", "arguments": {"item": {"cups": null}}}</tool_call>',
    '<tool_call>{"name": "count", "arguments": [[]]}</tool_call>',
    '<tool_call>{"name": ["count"], "arguments": {}}</tool_call>',
    '<tool_call>{"name": "__init__", "arguments": {"stock": {}}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1' + "0" * 300 + ', "b": 1}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": Infinity, "b": NaN}}</tool_call>',
    "<tool_call>" + "[" * 50_000,
    "\x00\ud800 <done>",
    "<think>38<done>",
]


def run_stockroom(extras, *actions):
    env = Stockroom({}, extras)
    return env, [env.step(action) for action in actions]


@cache
def listed(module: ModuleType, split: str) -> list[Task]:
    """All tasks of a split: each is made when it is asked for, and there are ten thousand."""
    return list(module.tasks(split))


# --- both


@pytest.mark.parametrize("module", [arithmetic, stockroom_tasks])
def test_tasks_are_the_same_each_time_and_their_ids_unique(module):
    for split in ("train", "eval"):
        tasks = module.tasks(split)
        assert len(tasks) >= (10_000 if split == "train" else 256)
        assert list(tasks[:300]) == list(module.tasks(split)[:300])
        assert len({task.id for task in listed(module, split)}) == len(tasks)
        assert tasks[-1] == tasks[len(tasks) - 1]
        assert list(tasks[3:5]) == [tasks[3], tasks[4]]
        with pytest.raises(IndexError):
            tasks[len(tasks)]
        assert {task.extras["difficulty"] for task in tasks[:300]} == {1, 2, 3}
        assert all(json.loads(json.dumps(task.extras)) == task.extras for task in tasks[:300])


@pytest.mark.parametrize("module", [arithmetic, stockroom_tasks])
def test_no_question_of_the_evaluation_is_trained_on(module):
    request = {split: {task.prompt[-1]["content"] for task in listed(module, split)} for split in ("train", "eval")}
    assert not request["train"] & request["eval"]
    # ... nor with its two parts changed round
    turned = {" ".join(sorted(text.split())) for text in request["train"]} & {
        " ".join(sorted(text.split())) for text in request["eval"] if " - " not in text
    }
    assert not turned


def test_what_a_task_means_never_changes():
    """The bundled model and reported scores depend on it."""
    assert arithmetic.tasks("eval")[0].prompt == [{"role": "user", "content": "What is 43 * 5?"}]
    first = stockroom_tasks.tasks("eval")[0]
    assert first.prompt[1]["content"] == "How many cards and pencils are there together?"
    assert first.extras["stock"] == {"cards": 35, "pencils": 69, "doors": 58, "buckets": 61}


# --- arithmetic


def test_arithmetic_questions_stay_in_their_ranges():
    counts = {op: len(problems(op)) for op in arithmetic.OPS}
    assert counts == {"+": 10_000, "-": 5_050, "*": 1_504}
    assert all(answer(*one) >= 0 for op in arithmetic.OPS for one in problems(op))
    assert question(47, "+", 85) == "What is 47 + 85?"
    assert [answer(7, op, 5) for op in arithmetic.OPS] == [12, 2, 35]
    assert all(is_held_out(a, "+", b) == is_held_out(b, "+", a) for a, _, b in problems("+"))
    levels = [
        ((3, "+", 4), 1),
        ((47, "+", 85), 2),
        ((85, "-", 42), 1),
        ((85, "-", 47), 2),
        ((7, "*", 8), 2),
        ((7, "*", 18), 3),
    ]
    assert all(arithmetic.difficulty(*problem) == level for problem, level in levels)
    kinds = Counter(task.id.partition("-")[0] for task in listed(arithmetic, "train"))
    assert kinds["add"] == 6_000
    assert kinds["subtract"] == 4_500
    assert kinds["multiply"] > 1_300


def test_the_right_number_wins_every_arithmetic_task():
    for task in listed(arithmetic, "eval"):
        env = Arithmetic({}, task.extras)
        output = env.step(arithmetic.solve(task))
        assert (output["reward"], output["done"], output["observations"]) == (1.0, True, [])
        assert env.get_metrics() == {"parse_error": 0.0}


@pytest.mark.parametrize(
    ("reply", "reward", "parse_error"),
    [
        ("132", 1.0, 0.0),
        ("47 + 85 = 132.", 1.0, 0.0),
        ("<think>47 + 85, maybe 131</think>132", 1.0, 0.0),
        ("<think>132</think>", 0.0, 1.0),
        ("0132", 1.0, 0.0),
        ("132 or 133", 0.0, 0.0),
        ("-132", 0.0, 0.0),
        ("132.5", 0.0, 1.0),
        ("no idea", 0.0, 1.0),
        ("", 0.0, 1.0),
        ("١٣٢", 0.0, 1.0),
    ],
)
def test_arithmetic_replies(reply, reward, parse_error):
    env = Arithmetic({}, {"answer": 132})
    assert env.step(reply)["reward"] == reward
    assert env.get_metrics() == {"parse_error": parse_error}
    with pytest.raises(RuntimeError, match="over"):
        env.step(reply)


@pytest.mark.parametrize("attack", ATTACKS)
def test_arithmetic_gives_nothing_to_attackers(attack):
    started = time.monotonic()
    assert Arithmetic({}, {"answer": 5}).step(attack)["reward"] == 0.0
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("extras", [{}, {"answer": "4"}, {"answer": None}])
def test_arithmetic_needs_an_answer(extras):
    with pytest.raises(ValueError, match="needs an 'answer'"):
        Arithmetic({}, extras)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10-5", 5),
        ("10 -5", -5),
        ("(-5)", -5),
        ("3.5", None),
        ("12 and 3.5", 12),
        ("5.", 5),
        ("Hm...12", 12),
        ("x5y", 5),
        ("1" * 19, None),
        ("-0", 0),
    ],
)
def test_last_integers(text, number):
    assert last_integer(text) == number


@given(st.text(max_size=30), st.integers(-(10**9), 10**9))
def test_the_last_integer_is_the_one_said_last(text, number):
    assert last_integer(f"{text} {number} and that is it") == number


# --- stockroom


def test_stockroom_words():
    assert SYSTEM == (
        "You answer questions about a stockroom. Tools: count(item), add(a, b), subtract(a, b). Call one tool in each "
        'message: <tool_call>{"name": "count", "arguments": {"item": "cups"}}</tool_call> When you know the answer, '
        "say it and end with <done>"
    )
    assert call_text("count", item="cups") in SYSTEM
    assert parse_tool_call(SYSTEM) == ParsedCall(name="count", arguments={"item": "cups"})
    texts = [stockroom_tasks.question(kind, ["cups", "pens"]) for kind in Kind]
    assert texts == [
        "How many cups are there?",
        "How many cups and pens are there together?",
        "How many more cups than pens are there?",
    ]
    assert len(ITEMS) == len(set(ITEMS)) == 60
    assert all(item.endswith("s") for item in ITEMS)


def test_stockroom_tasks_are_mixed_and_cannot_be_guessed():
    tasks = listed(stockroom_tasks, "train")
    kinds = Counter(task.extras["kind"] for task in tasks)
    for kind, percent in stockroom_tasks.SHARES:
        assert abs(kinds[kind] / len(tasks) - percent / 100) < 0.02
    counts = Counter(count for task in tasks for count in task.extras["stock"].values())
    assert set(counts) == set(range(10, 100))
    assert max(counts.values()) < 1.3 * len(tasks) * 4 / 90
    for task in tasks[:2000]:
        kind, items, stock = Kind(task.extras["kind"]), task.extras["items"], task.extras["stock"]
        assert len(stock) == 4
        assert stockroom_tasks.answer(kind, items, stock) > 0
        assert task.prompt[1]["content"] == stockroom_tasks.question(kind, items)


def test_perfect_play_wins_every_stockroom_task():
    for task in listed(stockroom_tasks, "eval"):
        said = stockroom_tasks.solve(task)
        env, outputs = run_stockroom(task.extras, *said)
        assert [output["done"] for output in outputs] == [False] * (len(said) - 1) + [True]
        assert [output["reward"] for output in outputs] == [0.0] * (len(said) - 1) + [1.0]
        assert env.get_metrics() == {
            "turns": len(said),
            "tool_calls": len(said) - 1,
            "tool_errors": 0,
            "parse_error": 0.0,
        }


def test_tools_answer_in_the_users_role():
    _, outputs = run_stockroom(CUPS, call_text("count", item="cups"), call_text("subtract", a="62", b=25), "37 <done>")
    assert [output["observations"] for output in outputs] == [
        [{"role": "user", "content": "Tool result: 62"}],
        [{"role": "user", "content": "Tool result: 37"}],
        [],
    ]
    assert outputs[-1]["reward"] == 1.0


@pytest.mark.parametrize(
    ("action", "observation"),
    [
        (call_text("count", item="cup"), "Error: unknown item 'cup'"),
        (call_text("count", item=5), "Error: unknown item '5'"),
        (call_text("count", item="y" * 90), f"Error: unknown item '{'y' * 40}…'"),
        (call_text("count"), "Error: count takes item"),
        (call_text("count", item="cups", colour="red"), "Error: count takes item"),
        (call_text("add", a=1), "Error: add takes a and b"),
        (call_text("add", a=True, b=1), "Error: a must be an integer"),
        (call_text("add", a=1, b="one"), "Error: b must be an integer"),
        (call_text("add", a=1, b=1.0), "Error: b must be an integer"),
        (call_text("add", a=10**19, b=1), "Error: a is too large"),
        (call_text("add", a="9" * 5000, b=1), "Error: a must be an integer"),
        (call_text("multiply", a=1, b=1), "Error: unknown tool 'multiply'"),
        ("I think there are many", "Error: no tool call found"),
        ("", "Error: no tool call found"),
        (call_text("add", a=" 2 ", b="-3"), "Tool result: -1"),
        (f"<think>{call_text('count', item='cups')}</think>{call_text('count', item='pens')}", "Tool result: 25"),
        (call_text("count", item="cups") + call_text("count", item="pens"), "Tool result: 62"),
    ],
)
def test_what_a_policy_is_told(action, observation):
    env, (output,) = run_stockroom(CUPS, action)
    assert output["observations"] == [{"role": "user", "content": observation}]
    metrics = env.get_metrics()
    assert metrics["parse_error"] == float("no tool call" in observation)
    assert metrics["tool_errors"] == float(observation.startswith("Error") and not metrics["parse_error"])


def test_broken_json_says_why():
    env, (output,) = run_stockroom(CUPS, '<tool_call>{"name": "count", </tool_call>')
    assert output["observations"][0]["content"].startswith("Error: ")
    assert "JSON" in output["observations"][0]["content"]
    assert env.get_metrics() == {"turns": 1, "tool_calls": 0, "tool_errors": 0, "parse_error": 1.0}


@pytest.mark.parametrize(
    ("final", "reward"),
    [
        ("37 <done>", 1.0),
        ("There are 62 - 25 = 37 more.<done>", 1.0),
        ("37 <done> or 38", 1.0),
        ("<think>36?</think> 37 <done>", 1.0),
        ("37, 38 <done>", 0.0),
        ("38 <done> 37", 0.0),
        ("<done> 37", 0.0),
        ("<done>", 0.0),
        (call_text("subtract", a=62, b=37) + "<done>", 0.0),  # an argument is not an answer
    ],
)
def test_the_answer_is_the_last_number_before_done(final, reward):
    env, (output,) = run_stockroom(CUPS, final)
    assert output["done"] is True
    assert output["metadata"]["done_reason"] == "agent_done"
    assert output["reward"] == reward
    with pytest.raises(RuntimeError, match="over"):
        env.step(final)


def test_a_call_and_done_in_one_message_runs_the_call_first():
    env, (output,) = run_stockroom(CUPS, "37 " + call_text("count", item="cups") + "<done>")
    assert (output["done"], output["reward"]) == (True, 1.0)
    assert output["metadata"]["observation"] == "Tool result: 62"
    assert env.get_metrics()["tool_calls"] == 1


def test_the_last_turn_is_graded_though_nobody_said_done():
    call = call_text("count", item="cups")
    _, outputs = run_stockroom(CUPS, call, call, call, call, call, "I say 37")
    assert [output["done"] for output in outputs] == [False] * 5 + [True]
    assert outputs[-1]["reward"] == 1.0
    assert outputs[-1]["metadata"]["done_reason"] == "max_turns"
    env, outputs = run_stockroom({**CUPS, "max_turns": 2}, call, call)
    assert (outputs[-1]["done"], outputs[-1]["reward"]) == (True, 0.0)
    with pytest.raises(RuntimeError, match="over"):
        env.step(call)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_stockroom_gives_nothing_to_attackers(attack):
    env = Stockroom({}, CUPS)
    started, reward = time.monotonic(), 0.0
    for _ in range(env.max_turns):
        output = env.step(attack)
        reward += output["reward"]
        assert all(len(message["content"]) < 300 for message in output["observations"])
        if output["done"]:
            break
    assert output["done"]
    assert reward == 0.0
    assert time.monotonic() - started < 2


def test_guessing_is_worth_next_to_nothing():
    tasks = listed(stockroom_tasks, "eval")
    answers = Counter(stockroom_tasks.solve(task)[-1] for task in tasks)
    guess, right = answers.most_common(1)[0]
    assert right / len(tasks) < 0.04
    assert sum(run_stockroom(task.extras, guess)[1][0]["reward"] for task in tasks) == right


@given(st.lists(st.one_of(st.text(max_size=40), st.sampled_from([*ATTACKS[:4], call_text("count", item="cups")]))))
@examples(100)
def test_no_text_makes_the_stockroom_raise_before_it_is_over(actions):
    env = Stockroom({}, CUPS)
    for turn, action in enumerate(actions, 1):
        output = env.step(action)
        assert output["done"] == ("<done>" in action or turn == 6)
        if output["done"]:
            break


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {**CUPS, "kind": "product"},
        {**CUPS, "items": ["cups", "dragons"]},
        {**CUPS, "items": ["cups"]},
        {**CUPS, "stock": None},
        {**CUPS, "stock": {"cups": "many", "pens": 1}},
    ],
)
def test_a_stockroom_that_makes_no_sense_is_refused(extras):
    with pytest.raises(ValueError, match="stockroom: a task needs 'kind', 'items' and 'stock' that fit"):
        Stockroom({}, extras)
