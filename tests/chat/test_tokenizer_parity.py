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


CHATS = {"plain": PLAIN, "system": WITH_SYSTEM, "turns": TURNS, "tool": TOOL_TURNS}
ALTERNATING = {"brackets"}
"""Templates that refuse tool turns."""
CASES = [
    pytest.param(style, chat, id=f"{style}-{name}")
    for style in ("chatml", "thinking", "headers", "brackets")
    for name, chat in CHATS.items()
    if not (style in ALTERNATING and name == "tool")
]


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
    wanted = theirs.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=False, **({"add_generation_prompt": True} | options)
    )
    assert ours.encode_chat(messages, tools, **options) == wanted
    rendered = theirs.apply_chat_template(
        messages, tools=tools, tokenize=False, **({"add_generation_prompt": True} | options)
    )
    assert ours.render(messages, tools, **options) == rendered
    assert ours.decode(wanted, skip_special=False) == theirs.decode(wanted)
    assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)


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
