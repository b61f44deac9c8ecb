"""`palestra rollout`: finding rollouts, reading them, and no way for a model's words to do more than be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from palestra.cli.run.rollout import rollout
from palestra.cli.run.token_view import Color, colored
from palestra.runs.rollout_filter import WhereError, parse_where
from palestra.runs.token_cells import TokenCell, TokenOrigin, load_tokenizer, token_cells, token_texts
from palestra.runs.writer import RunFolder
from palestra.training.batches.grpo_batch import build_batch
from palestra.types.rollouts import RolloutStop
from tests.training.records import group_of, make_config, make_group, make_rollout, make_turn

EVIL = "[bold red]no markup[/] \x1b]0;title\x07\x1b[2J\u202e end"


def call(*args: object, **env: str) -> Result:
    return CliRunner().invoke(rollout, [*map(str, args)], prog_name="palestra rollout", env=env)


def answer(*args: object):
    result = call(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def _a_run(tmp_path, monkeypatch, micro_model):
    monkeypatch.chdir(tmp_path)
    config = make_config()
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": EVIL, "tool_calls": [1]}]
    shutil.copy(micro_model / "tokenizer.json", tmp_path)
    with RunFolder.create("runs", "first", config, {"tokenizer": str(tmp_path)}) as run:
        for step in (1, 2):
            rollouts = [
                make_rollout(f"g{step}-0", 1.0, messages=messages, metrics={"parse_error": 1.0}),
                make_rollout(f"g{step}-1", 0.1, [make_turn(4, observation=2)], stop=RolloutStop.LENGTH),
                make_rollout(f"g{step}-2", None, [], stop=RolloutStop.TIMEOUT, error="too \x1b[31mslow"),
            ]
            groups = [group_of(f"g{step}", rollouts, step=step)]
            run.write_rollouts(step, groups, build_batch(groups, config).sequences)
            run.write_eval(step, [make_group("eval-x", [step / 2])], {})


def ids(*args: object) -> list[str]:
    return [record["id"] for record in answer("list", "first", *args)]


def test_rollouts_are_listed_newest_step_first():
    assert ids() == ["g2-0", "g2-1", "g2-2", "g1-0", "g1-1", "g1-2"]
    assert ids("--step", 1) == ["g1-0", "g1-1", "g1-2"]
    assert ids("--eval") == ["eval-x-0", "eval-x-0"]
    assert ids("--limit", 2) == ["g2-0", "g2-1"]
    shown = call("list", "first", "--limit", 2).stdout
    assert "more than 2; to see all: --limit 0" in shown
    assert "palestra rollout show g2-0 --run first" in shown


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("reward<0.2 and stop='length'", ["g1-1"]),
        ("reward < 0.2", ["g1-1"]),
        ("not reward >= 0.2", ["g1-1", "g1-2"]),
        ("reward = 1", ["g1-0"]),
        ("reward == None", ["g1-2"]),
        ("0 < reward <= 1 or stop in ('timeout', 'stale')", ["g1-0", "g1-1", "g1-2"]),
        ("metrics.parse_error > 0", ["g1-0"]),
        ("metrics['parse_error'] != None", ["g1-0"]),
        ("'slow' in error", ["g1-2"]),
        ("used", ["g1-0", "g1-1"]),
        ("not used and turns=0", ["g1-2"]),
        ("env = 'math' and reward > -1", ["g1-0", "g1-1"]),
        ("id = 'a=b'", []),
    ],
)
def test_conditions_choose(where, expected):
    assert ids("--step", 1, "--where", where) == expected


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("rewrd<1", "did you mean 'reward'?"),
        ("reward<", "is not a condition"),
        ("", "is not a condition"),
        ("__import__('os').system('x')", "is not allowed in a condition"),
        ("id.__class__", "is not allowed in a condition"),
        ("metrics.x.y > 1", "is not allowed in a condition"),
        ("reward**9**9**9 > 1", "is not allowed in a condition"),
        ("[x for x in id]", "is not allowed in a condition"),
        ("(lambda: 1)()", "is not allowed in a condition"),
        ("reward is None", "compare with <"),
        ("stop < 3", "a number with text"),
        ("reward in 3", "must be followed by text or a list"),
        ("(" * 300 + "1" + ")" * 300, "is not a condition"),
        ("x" * 1001, "at most 1000 characters"),
        ("f'{reward}'", "is not allowed in a condition"),
        ("b'x' = id", "is not allowed in a condition"),
    ],
)
def test_what_is_no_condition_is_refused_with_exit_code_2(where, message):
    result = call("list", "first", "--where", where)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())


@given(st.text(max_size=60))
def test_any_text_is_a_condition_or_refused(text):
    try:
        parse_where(text)({"reward": 1.0, "stop": "done", "metrics": {}})
    except WhereError:
        pass


def test_a_rollout_is_read_and_its_words_are_only_words():
    for env in ({}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}):
        shown = call("show", "g2-0", **env)
        assert shown.exit_code == 0, shown.output
        assert "[bold red]no markup[/] \\x1b]0;title\\x07\\x1b[2J\\u202e end" in shown.stdout
        assert "tool_calls: [1]" in shown.stdout
        assert "\x07" not in shown.stdout
        assert "\x1b]0" not in shown.stdout
        assert "\x1b[2J" not in shown.stdout
    assert "\x1b[" in shown.stdout  # ours: the roles have colours
    failed = call("show", "g2-2").stdout
    assert "too \\x1b[31mslow" in failed
    listed = call("list", "first").stdout
    assert "\x1b" not in listed
    assert "too \\x1b[31mslow" in listed


def test_ids_may_be_short_and_evaluations_have_steps():
    assert answer("show", "g1-1")["reward"] == 0.1
    assert answer("show", "g1")["id"] == "g1-0"
    assert answer("show", "eval-x-0")["reward"] == 1.0
    assert answer("show", "eval-x-0", "--step", 1)["reward"] == 0.5
    assert answer("show", "g1-1", "--run", "first")["run"] == "first"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "nobody"], "no rollout 'nobody' in any run in runs"),
        (["show", "g1-0", "--run", "frist"], "did you mean 'first'?"),
        (["show", "g1-0", "--step", "7"], "no rollout 'g1-0' in any run in runs at step 7"),
        (["show", "eval-x-0", "--tokens"], "evaluations store no tokens"),
        (["list", "first", "--step", "9"], "has no rollouts of step 9; there are steps 1 to 2"),
        (["list", "other"], "no run 'other'"),
    ],
)
def test_what_is_not_there_is_one_line_and_exit_code_3(args, message):
    result = call(*args)
    assert result.exit_code == 3, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_tokens_without_colours_are_a_table():
    shown = call("show", "g1-1", "--tokens")
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.stdout.splitlines()]
    head = lines.index(["place", "id", "origin", "logprob", "advantage", "text"])
    assert lines[head + 1][:5] == ["0", "1", "prompt", "-", "-"]
    assert lines[head + 3][:5] == ["2", "900", "observation", "-", "-"]
    place, token, origin, logprob, advantage, *_ = lines[head + 5]
    assert (place, token, origin, logprob) == ("4", "10", "sampled", "-0.5")
    assert float(advantage) < 0
    response = answer("show", "g1-1", "--tokens")
    assert response["tokens_of"]["turns"][0]["observation"] == [900, 901]


@pytest.mark.parametrize("color", ["mask", "logprob", "advantage"])
def test_tokens_have_colours_where_there_are_some(color):
    shown = call("show", "g1-1", "--tokens", "--color", color, FORCE_COLOR="1", TERM="xterm-256color")
    assert shown.exit_code == 0, shown.output
    assert "\x1b[" in shown.stdout


def test_without_a_tokenizer_ids_are_shown():
    Path("tokenizer.json").write_text("broken")
    shown = call("show", "g1-1", "--tokens")
    assert shown.exit_code == 0
    assert "<900>" in shown.stdout
    assert "ids are shown" in shown.stderr


def test_colours_tell_what_was_asked():
    cells = [
        TokenCell(1, "p", TokenOrigin.PROMPT),
        TokenCell(2, "[red]\n", TokenOrigin.SAMPLED, -0.0, 1.0),
        TokenCell(3, "y", TokenOrigin.SAMPLED, -9.0, -0.5),
        TokenCell(4, "z", TokenOrigin.SAMPLED, -3.0, None),
    ]

    def styles(color: Color) -> list[str]:
        text = colored(cells, color)
        assert isinstance(text, Text)
        assert text.plain == "p[red]↵\nyz"
        return [str(span.style) for span in text.spans]

    assert styles(Color.MASK) == ["dim", "green", "green", "green"]
    assert styles(Color.LOGPROB) == ["dim", "rgb(0,255,0)", "rgb(255,0,0)", "rgb(255,255,255)"]
    assert styles(Color.ADVANTAGE) == ["dim", "rgb(0,255,0)", "rgb(255,128,128)", "dim"]


def test_the_pieces_of_the_tokens_are_the_text(micro_model):
    tokenizer = load_tokenizer(str(micro_model))
    assert tokenizer is not None
    for text in ("Hello  world\n", "ü € 漢字 👩‍👩‍👧", "<|im_start|>user\nhi<|im_end|>"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert "".join(token_texts(ids, tokenizer)) == tokenizer.decode(ids, skip_special_tokens=False)
    assert load_tokenizer(None) is None
    assert load_tokenizer("/nowhere") is None


def test_a_rollout_that_was_not_trained_on_has_no_advantages():
    record = {"prompt": [1], "turns": [{"observation": [], "tokens": [2], "logprobs": [-1.0]}], "advantages": None}
    assert [(cell.text, cell.advantage) for cell in token_cells(record, None)] == [("<1>", None), ("<2>", None)]


def test_what_the_verifier_said_is_shown_as_text():
    with RunFolder.create("runs", "judged", make_config()) as run:
        judged = make_rollout("v-0", 0.0, verdict={"missed": ["changes"], "stdout": EVIL})
        run.write_rollouts(1, [group_of("v", [judged], step=1)])
    shown = call("show", "v-0", "--run", "judged")
    assert shown.exit_code == 0, shown.output
    assert '"missed"' in shown.stdout
    assert "\x1b" not in shown.stdout
    assert "\u202e" not in shown.stdout
    assert ids("--where", "level=None and reward>0.5") == ["g2-0", "g1-0"]
