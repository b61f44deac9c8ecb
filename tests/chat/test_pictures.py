"""Pictures in the text of messages: the tokens of transformers' templates, and nothing that text could forge."""

from __future__ import annotations

import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.canonical import chain
from palestra.chat.pictures import PictureMark, PictureTokens, lasting, with_parts
from palestra.types.pictures import Resizing

TEMPLATE = """
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""It places pictures as those of the Qwen families do."""
GEMMA = """
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content | trim -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' -%}
                {{- 'BETWEEN<|image|>BETWEEN' -}}
            {%- else -%}
                {{- part.text | trim -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""The same for those of Gemma 4, which drop white space around texts; some versions have empty lines in BETWEEN."""
FIRST, SECOND = PictureMark("a1" * 32, 3), PictureMark("b2" * 32, 5)


@pytest.fixture(scope="module")
def folder(random_model, tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("seeing")
    for file in random_model("qwen3_vl").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="module")
def tokens(tokenizer: ChatTokenizer) -> PictureTokens:
    assert tokenizer.pictures is not None
    return tokenizer.pictures


def asked(*parts: str | PictureMark) -> Any:
    return [{"role": "user", "content": "".join(p if isinstance(p, str) else p.text for p in parts)}]


def in_parts(*parts: str | PictureMark) -> Any:
    shown = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
    return [{"role": "user", "content": shown}]


CONTENTS = [
    ("Look ", FIRST, " and ", SECOND, "!"),
    (FIRST, SECOND),
    (FIRST, "<|image_pad|> is only a word"),
    ("none",),
]


@pytest.mark.slow
@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
def test_pictures_stand_where_templates_place_them(folder: Path, tokenizer, tokens, content) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    # transformers takes names of special tokens in text for these tokens: we compare the rest
    plain = [p.replace("<|image_pad|>", "This") if isinstance(p, str) else p for p in content]
    text = theirs.apply_chat_template(in_parts(*plain), tokenize=False, add_generation_prompt=True)
    rows = [p.rows for p in content if isinstance(p, PictureMark)]
    expected = [
        token
        for token, run in groupby(theirs.encode(text, add_special_tokens=False))
        for _ in range(len(list(run)) if token != tokens.image_id else rows.pop(0))
    ]
    assert tokenizer.encode_chat(asked(*plain)) == expected
    marks = [p for p in content if isinstance(p, PictureMark)]
    ids = tokenizer.encode_chat(asked(*content))
    assert ids.count(tokens.image_id) == sum(mark.rows for mark in marks)
    starts = tokens.places(ids, marks)
    assert [ids[start : start + mark.rows] for start, mark in zip(starts, marks, strict=True)] == [
        [tokens.image_id] * mark.rows for mark in marks
    ]


@pytest.mark.parametrize("between", ["", "\\n\\n"])
@pytest.mark.parametrize("content", CONTENTS[:2], ids=range(2))
def test_pictures_stand_where_gemmas_templates_place_them(random_model, tmp_path, between, content) -> None:
    for file in random_model("gemma4_vl").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(GEMMA.replace("BETWEEN", between))
    tokenizer = ChatTokenizer.load(tmp_path)
    assert tokenizer.card is not None
    assert tokenizer.card.sizes.resizing is Resizing.LARGEST
    shown = tokenizer.render(in_parts(*content)).split("<|image|>")
    marks = [part for part in content if isinstance(part, PictureMark)]
    written = [f"<|image>{'<|image|>' * mark.rows}<image|>" for mark in marks]
    text = "".join(part for pair in zip(shown, [*written, ""], strict=True) for part in pair)
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_chat(asked(*content)) == expected


def test_a_turn_behind_an_answer_has_its_picture(tokenizer, tokens) -> None:
    tokens_behind = tokenizer.observation(asked("See: ", SECOND))
    assert tokens_behind.count(tokens.image_id) == 5


def test_text_is_never_a_picture(tokenizer, tokens) -> None:
    for text in (lasting(FIRST.text), "\ufdd0" + "a1" * 32 + ":3\ufdd1", "<|vision_start|><|image_pad|><|vision_end|>"):
        assert tokens.image_id not in tokenizer.encode_chat(asked(text))
        assert tokens.image_id not in tokenizer.encode_text(text)


def test_pictures_are_found_among_sampled_tokens_of_their_kind(tokens) -> None:
    image = tokens.image_id
    ids = [1, image, image, 2, *[image] * 3, 3, image, 4, *[image] * 5]
    assert tokens.places(ids, [FIRST, SECOND]) == [4, 10]
    with pytest.raises(ChatError, match="leaves out picture 2 of 2"):
        tokens.places(ids[:-1], [FIRST, SECOND])


def test_conversations_are_named_alike_in_every_process_and_shown_with_parts() -> None:
    messages = asked("See ", FIRST, ".")
    stable = [{"role": "user", "content": lasting(messages[0]["content"])}]
    assert chain(None, messages) == chain(None, stable)
    assert chain(None, messages) != chain(None, asked("See ", SECOND, "."))
    (shown,) = with_parts(messages)
    assert shown["content"] == [
        {"type": "text", "text": "See "},
        {"type": "image_url", "image_url": {"url": f"picture:{FIRST.digest}"}},
        {"type": "text", "text": "."},
    ]
    assert with_parts(asked("text")) == asked("text")
