"""Rows in other layouts: nothing is lost without being told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.data.errors import DatasetError
from palestra.data.layouts import Layout, convert_row

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize(
    ("row", "to", "expected"),
    [
        ({"messages": [USER, ANSWER], "id": 7}, "prompt-completion", {"prompt": "2 + 2?", "completion": "4", "id": 7}),
        (
            {"messages": [SYSTEM, USER, ANSWER]},
            "prompt-completion",
            {"prompt": [SYSTEM, USER], "completion": "4"},
        ),
        ({"prompt": "2 + 2?", "response": "4"}, "messages", {"messages": [USER, ANSWER]}),
        (
            {"messages": [SYSTEM, USER, ANSWER]},
            "sharegpt",
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "2 + 2?"},
                    {"from": "gpt", "value": "4"},
                ]
            },
        ),
        (
            {
                "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}],
                "system": "Be brief.",
                "tools": "[]",
            },
            "messages",
            {"messages": [SYSTEM, USER, ANSWER], "tools": []},
        ),
        (
            {"conversations": [{"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}]},
            "messages",
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        ),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "5"}]},
            "preferences",
            {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        ),
        ({"prompt": [USER], "answer": 4}, "prompts", {"prompt": "2 + 2?", "answer": 4}),
    ],
)
def test_layouts_are_converted(row, to, expected):
    assert convert_row(row, Layout(to), lossy=False) == expected


@pytest.mark.parametrize(
    ("row", "to", "lost", "expected"),
    [
        (
            {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
            "messages",
            "the rejected answer",
            {"messages": [USER, ANSWER]},
        ),
        (
            {"messages": [USER, ANSWER, USER, ANSWER]},
            "prompt-completion",
            "that 2 answers are learned",
            {"prompt": [USER, ANSWER, USER], "completion": "4"},
        ),
        (
            {"messages": [USER, ANSWER, USER]},
            "prompt-completion",
            "what follows the last answer",
            {"prompt": "2 + 2?", "completion": "4"},
        ),
        (
            {"prompt": [USER, ANSWER, USER], "completion": "4"},
            "messages",
            "answers within the prompt are not learned",
            {"messages": [USER, ANSWER, USER, ANSWER]},
        ),
        (
            {"messages": [USER, {**ANSWER, "reasoning_content": "Hm."}]},
            "sharegpt",
            "reasoning_content of a message",
            {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        ),
        ({"messages": [USER, ANSWER]}, "prompts", "the answer", {"prompt": "2 + 2?"}),
    ],
)
def test_loss_is_refused_unless_it_is_allowed(row, to, lost, expected):
    with pytest.raises(DatasetError, match=f"{to} cannot say all of it: .*{lost}.*--lossy"):
        convert_row(row, Layout(to), lossy=False)
    assert convert_row(row, Layout(to), lossy=True) == expected


@pytest.mark.parametrize(
    ("row", "to", "said"),
    [
        ({"text": "Hi"}, "messages", "unknown layout .it has 'text'.; it should have messages"),
        ({"messages": [USER, ANSWER]}, "preferences", "no rejected answer"),
        ({"messages": [USER, ANSWER], "prompt": "?"}, "prompt-completion", "a field 'prompt' already"),
        ({"messages": [ANSWER]}, "prompt-completion", "there is no prompt"),
        ({"conversations": [{"from": "alien", "value": "Hi"}]}, "messages", r"conversations\[0\]"),
        ({"conversations": [{"from": "function_call", "value": "no"}]}, "messages", "JSON with name and arguments"),
        ({"chosen": "a", "rejected": "b"}, "preferences", "no 'prompt'"),
        ({"chosen": [USER], "rejected": [ANSWER]}, "preferences", "do not begin alike"),
    ],
)
def test_what_cannot_be_converted_says_why(row, to, said):
    for lossy in (False, True):
        with pytest.raises(DatasetError, match=said):
            convert_row(row, Layout(to), lossy=lossy)


texts = st.text(max_size=8)
talks = st.lists(st.tuples(texts, texts), min_size=1, max_size=3).map(
    lambda turns: [
        message
        for asked, said in turns
        for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": said})
    ]
)


@given(talks, st.sampled_from([Layout.SHAREGPT, Layout.PROMPT_COMPLETION]), st.booleans())
def test_there_and_back_is_the_same(messages, layout, with_system):
    row = {"messages": [SYSTEM, *messages] if with_system else messages, "id": 3}
    try:
        there = convert_row(row, layout, lossy=False)
    except DatasetError:
        assert layout is Layout.PROMPT_COMPLETION
        assert len(messages) > 2
        return
    assert convert_row(there, Layout.MESSAGES, lossy=False) == row
