"""A puppet is a real model: in transformers too it says what its script tells it to, however long the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from palestra.testing.puppet import OTHERWISE, Cue, ScriptError, make_puppet, read_script

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "echo naïve > note.txt"}}\n</tool_call>'
SCRIPT = [
    Cue(when="write a note", say=f"I write it.\n{CALL}"),
    Cue(when="I write it.", say="It is written: 世界 ✓."),
    Cue(when="a title", say="Notes of the day"),
]


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_puppet(tmp_path_factory.mktemp("puppet"), SCRIPT)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)

    def ask(*messages: tuple[str, str]) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        torch.manual_seed(0)
        tokens = model.generate(**prompt, max_new_tokens=80, do_sample=True)[0, prompt["input_ids"].shape[1] :]
        assert tokens[-1] == tokenizer.eos_token_id
        assert len(tokens) > 3  # a chain, not one token for all
        return tokenizer.decode(tokens, skip_special_tokens=True)

    return ask


def test_script_is_played_turn_after_turn(answer):
    question = ("user", f"{'Some words before. ' * 1000}Please write a note! {'And after. ' * 1000}")
    first = answer(question)
    assert first == SCRIPT[0].say
    assert answer(question, ("assistant", first), ("user", "done")) == SCRIPT[1].say
    assert answer(question, ("assistant", first), ("user", "make a title")) == SCRIPT[2].say


def test_without_a_cue_it_says_so(answer):
    assert answer(("user", "Hello!")) == OTHERWISE


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([Cue(when="x", say="No.")], "two characters"),
        ([Cue(when="go", say="Yes."), Cue(when="go", say="No.")], "each has one answer"),
        ([Cue(when="go", say="Yes."), Cue(when="go on", say="No.")], "is part of the cue 'go on'"),
        ([Cue(when="go", say="")], "empty"),
        ([Cue(when="go", say="I go"), Cue(when="come", say="I go too")], "'go' occurs in two answers"),
        ([Cue(when="go", say="I go, and go.")], "'go' occurs in two answers, or twice in one"),
        ([Cue(when="once", say="Yes."), Cue(when="again", say="Yes.")], "'Yes.' is said in two answers"),
        ([Cue(when=f"cue {n};", say=f"Answer {n}.") for n in range(129)], "at most 128"),
    ],
)
def test_script_that_cannot_be_played_is_refused(tmp_path: Path, script, message):
    with pytest.raises(ScriptError, match=message):
        make_puppet(tmp_path, script)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "JSON list"),
        ('[{"when": "go"}]', "JSON list"),
        ('[{"when": "go", "says": "Yes."}]', "JSON list"),
        ('[{"say": "Yes."}, {"say": "No."}]', "2 entries"),
    ],
)
def test_script_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(ScriptError, match=message):
        read_script(text)


def test_script_is_read():
    assert read_script('[{"when": "go", "say": "I go."}]') == ([Cue(when="go", say="I go.")], OTHERWISE)
    assert read_script('[{"say": "What?"}]') == ([], "What?")
