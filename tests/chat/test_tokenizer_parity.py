"""The same tokens as transformers, whatever the template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palestra.chat import ChatTokenizer

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "Größe <b> & 'more'", "parameters": {"type": "object"}},
    }
]
PLAIN = [{"role": "user", "content": "What is 12 + 30?\n\nSay it — in Ελληνικά 🙂."}]
WITH_SYSTEM = [{"role": "system", "content": "Be brief.  "}, *PLAIN]
TURNS = [
    *WITH_SYSTEM,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n42"},
    {"role": "user", "content": "<tool_call> is only a word & so is <b>"},
]
TOOL_TURNS = [
    *PLAIN,
    {"role": "assistant", "content": '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'},
    {"role": "tool", "content": "[1, 2]"},
    {"role": "tool", "content": "{}"},
]
CALLS = [
    *PLAIN,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "look",
        "tool_calls": [{"id": "c", "function": {"name": "look_up", "arguments": {"ü": [1, {"b": None}], "a": "<b>"}}}],
    },
    {"role": "tool", "content": "42", "tool_call_id": "c"},
]
CHATS = {"plain": PLAIN, "system": WITH_SYSTEM, "turns": TURNS, "tool": TOOL_TURNS, "calls": CALLS}
STYLES = ("chatml", "thinking", "headers", "brackets", "turns", "bars", "open")
CASES = [pytest.param(style, chat, id=f"{style}-{name}") for style in STYLES for name, chat in CHATS.items()]


@pytest.mark.parametrize(("style", "messages"), CASES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"enable_thinking": False}], ids=str)
def test_encodes_as_transformers(
    style: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
    style_folder: Callable[[str], Path],
    tokenizer_of: Callable[[str], ChatTokenizer],
) -> None:
    theirs = _transformers(style_folder(style))
    ours = tokenizer_of(style)
    expected = theirs.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=False, **({"add_generation_prompt": True} | options)
    )
    kwargs = {name: value for name, value in options.items() if name != "add_generation_prompt"}
    prompted = options.get("add_generation_prompt", True)
    assert ours.encode_chat(messages, tools, prompted, template_kwargs=kwargs) == expected
    rendered = theirs.apply_chat_template(
        messages, tools=tools, tokenize=False, **({"add_generation_prompt": True} | options)
    )
    assert ours.render(messages, tools, prompted, kwargs) == rendered
    assert ours.decode(expected, skip_special=False) == theirs.decode(expected)
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("content", ["It is", " It is  ", "<think>\nIt", "", "<|im_end|"])
def test_an_answer_is_continued_as_transformers_does(
    style: str, content: str, style_folder: Callable[[str], Path], tokenizer_of: Callable[[str], ChatTokenizer]
) -> None:
    messages = [*PLAIN, {"role": "assistant", "content": content}]
    expected = _transformers(style_folder(style)).apply_chat_template(
        messages, tokenize=True, return_dict=False, continue_final_message=True
    )
    assert tokenizer_of(style).encode_chat(messages, continue_final_message=True) == expected


def test_a_list_of_templates_has_one_for_tools(style_folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(style_folder("chatml"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    body = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}<|im_end|>\n    {% endif %}\n{% endfor %}\n"
    config["chat_template"] = [
        {"name": "default", "template": body},
        {"name": "tool_use", "template": "with tools: " + body},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = ChatTokenizer.load(tmp_path), _transformers(tmp_path)
    for tools in (None, TOOLS):
        assert ours.render(PLAIN, tools) == theirs.apply_chat_template(PLAIN, tools=tools, tokenize=False)
    assert ours.render(PLAIN, TOOLS).startswith("with tools: ")


_LOADED: dict[Path, Any] = {}


def _transformers(folder: Path) -> Any:
    if folder not in _LOADED:
        from transformers import PreTrainedTokenizerFast

        _LOADED[folder] = PreTrainedTokenizerFast.from_pretrained(folder)
    return _LOADED[folder]
