"""Pictures of messages: read from data and file URLs, placed among tokens, and refused with a sentence."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.picture_files import TextOnlyModel, read_pictures, with_opened_files
from palestra.util.picture_parts import data_url, url_part
from tests.pictures import drawn, file_of

FILE = file_of(drawn(1))
URL = data_url(FILE, "image/png")


@pytest.fixture(scope="module")
def tokenizer(random_model) -> ChatTokenizer:
    return ChatTokenizer.load(random_model("qwen3_vl"))


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    "part",
    [
        url_part(URL),
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "image": URL},
    ],
)
def test_parts_of_every_api_are_placed(tokenizer, part):
    seen = read_pictures(asked({"type": "text", "text": "See "}, part, part), tokenizer.card)
    ids = tokenizer.encode_chat(seen.messages)
    pictures = seen.placed(tokenizer.pictures, ids, offset=100)
    digest = hashlib.sha256(FILE).hexdigest()
    assert [(one.rows, one.file.digest, one.file.data) for one in pictures] == [(12, digest, FILE)] * 2
    for one in pictures:
        assert ids[one.start - 100 : one.end - 100] == [tokenizer.card.image_token] * 12
    assert seen.shown[0]["content"][1:] == [url_part(f"picture:{digest}")] * 2
    again = read_pictures(seen.shown, tokenizer.card, {digest: pictures[0].file})
    assert again.messages == seen.messages


def test_files_are_opened_where_the_caller_allows_it(tokenizer, tmp_path):
    (tmp_path / "a b.png").write_bytes(FILE)
    messages = asked(url_part((tmp_path / "a b.png").as_uri()))
    assert read_pictures(messages, tokenizer.card, opens_files=True).files[0].data == FILE
    assert with_opened_files(messages) == asked(url_part(URL))
    with pytest.raises(ChatError, match="is not fetched"):
        read_pictures(messages, tokenizer.card)


@pytest.mark.parametrize("name", ["/dev/zero", "."])
def test_only_regular_files_are_opened(tokenizer, name):
    messages = asked(url_part(Path(name).absolute().as_uri()))
    with pytest.raises(ChatError, match="cannot be read: it is not a regular file"):
        read_pictures(messages, tokenizer.card, opens_files=True)
    with pytest.raises(ChatError, match="cannot be read: it is not a regular file"):
        with_opened_files(messages)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (url_part(""), r"messages\[0\].content\[0\]: a picture's part has no URL"),
        (url_part("https://example.com/a.png"), "is not fetched; send the file as data:image/png"),
        (url_part("data:image/png;base64"), "has no comma"),
        (url_part("data:image/png;base64,*"), "is not base64"),
        (url_part(data_url(FILE[:300], "image/png")), "the picture is cut short"),
        (url_part(data_url(b"text", "image/png")), "is no PNG, JPEG, WebP or GIF file"),
        (url_part(data_url(file_of(drawn(1, 1608, 8)), "image/png")), "may differ by a factor of 200"),
        (url_part(f"picture:{'ab' * 32}"), "picture:abababababab is not there any more"),
    ],
)
def test_what_cannot_be_read_is_named(tokenizer, part, said):
    with pytest.raises(ChatError, match=said):
        read_pictures(asked(part), tokenizer.card)


def test_other_parts_and_pictures_of_the_assistant_are_refused(tokenizer):
    with pytest.raises(ChatError, match="a part of type 'audio'; models read text and pictures"):
        read_pictures(asked(url_part(URL), {"type": "audio"}), tokenizer.card)
    with pytest.raises(ChatError, match="an answer of the assistant has a picture"):
        read_pictures([{"role": "assistant", "content": [url_part(URL)]}], tokenizer.card)


def test_models_that_read_text_only_refuse_pictures_and_nothing_else(random_model):
    blind = ChatTokenizer.load(random_model("qwen3"))
    assert blind.card is None
    text = asked({"type": "text", "text": "Hello"})
    assert read_pictures(text, blind.card).messages == text
    with pytest.raises(TextOnlyModel, match="this model reads text only"):
        read_pictures(asked(url_part(URL)), blind.card)
