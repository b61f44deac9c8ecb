"""Tokenizer folders: the one that `palestra model random` writes, and it with other families' tokens and templates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from palestra.chat import ChatTokenizer
from palestra.testing.random_tokenizer import write_tokenizer

TEMPLATES = Path(__file__).with_name("templates")

STYLES: dict[str, dict[str, Any]] = {
    "chatml": {},
    "thinking": {},
    "qwen35": {"eos_token": "<|endoftext|>"},
    "qwen38": {"eos_token": "<|endoftext|>"},
    "nemotron": {"eos_token": "<|endoftext|>"},
    "headers": {
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end_of_text|>", "special": True},
        "added": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    },
    "brackets": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "added": [
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ],
    },
    "turns": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "added": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    },
    "bars": {
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": "<｜end▁of▁sentence｜>",
        "added": [
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ],
    },
    "open": {
        "eos_token": "<|endoftext|>",
        "added": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "stops": ["<|user|>", "<|observation|>"],
    },
    "harmony": {
        "eos_token": "<|return|>",
        "added": [
            *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
            *("<|startoftext|>",),
        ],
        "stops": ["<|return|>", "<|call|>", "<|endoftext|>"],
    },
    "gemma4": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "added": [
            *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", '<|"|>'),
            *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
        ],
        "stops": ["<turn|>", "<|tool_response>"],
    },
    "glm": {
        "eos_token": "<|endoftext|>",
        "added": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "markup": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        "stops": ["<|user|>", "<|observation|>"],
    },
}
"""Keys of tokenizer_config.json that differ, special tokens to add, others to add that are ordinary text, and what
generation_config.json calls eos."""


@pytest.fixture(scope="session")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, vocab_size=512, max_positions=4096)
    return folder


@pytest.fixture(scope="session")
def style_folder(bare_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(style: str) -> Path:
        if style not in made:
            made[style] = shutil.copytree(bare_folder, tmp_path_factory.mktemp(style), dirs_exist_ok=True)
            dress(made[style], style)
        return made[style]

    return get


@pytest.fixture(scope="session")
def tokenizer_of(style_folder: Callable[[str], Path]) -> Callable[[str], ChatTokenizer]:
    loaded: dict[str, ChatTokenizer] = {}

    def get(style: str) -> ChatTokenizer:
        if style not in loaded:
            loaded[style] = ChatTokenizer.load(style_folder(style))
        return loaded[style]

    return get


def dress(folder: Path, style: str) -> None:
    """Gives a folder with the tokenizer of a random model a family's tokens and template."""
    config = json.loads((folder / "tokenizer_config.json").read_text()) | STYLES[style]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in config.pop("added", [])])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in config.pop("markup", [])])
    tokenizer.save(str(folder / "tokenizer.json"))
    if stops := config.pop("stops", None):
        ids = [tokenizer.token_to_id(text) for text in stops]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    if style != "chatml":
        config["chat_template"] = (TEMPLATES / f"{style}.jinja").read_text()
        (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
