"""Text that comes token by token is the text of all tokens, whatever they cut through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from palestra.chat import ChatTokenizer
from palestra.chat.detokenizer import IncrementalDecoder
from palestra.chat.tokenizer_files import TokenizerFiles
from palestra.config.bundled import bundled_model

FOLDER = bundled_model("ephebe")
assert FOLDER is not None
EPHEBE = ChatTokenizer.load(FOLDER)
LIBRARY = str(FOLDER / "tokenizer.json")
BYTES = EPHEBE.encode_text("€🙂é\ufffd")
"""Tokens of parts of characters, in this small vocabulary."""


def decoded(decoding: IncrementalDecoder, pieces: Iterable[Sequence[int]]) -> str:
    return "".join([*map(decoding.feed, pieces), decoding.finish()])


def cut(tokens: list[int], places: list[int]) -> list[list[int]]:
    return [tokens[a:b] for a, b in pairwise([0, *sorted(place % (len(tokens) + 1) for place in places), len(tokens)])]


IDS = st.one_of(st.sampled_from(BYTES), st.integers(0, 2047))


@given(st.one_of(st.text().map(EPHEBE.encode_text), st.lists(IDS, max_size=80)), st.lists(st.integers(0, 100)))
@example([BYTES[0]] * 100, [])
@example(EPHEBE.encode_text("\ufffd" * 40), [])
def test_all_pieces_are_the_whole(tokens: list[int], places: list[int]) -> None:
    whole = EPHEBE.decode(tokens)
    assert decoded(IncrementalDecoder(EPHEBE), cut(tokens, places)) == whole
    assert decoded(IncrementalDecoder(EPHEBE), [[token] for token in tokens]) == whole
    assert decoded(IncrementalDecoder(EPHEBE, keep_special=True), [[t] for t in tokens]) == EPHEBE.decode(
        tokens, skip_special=False
    )


def test_a_character_is_told_when_it_is_complete() -> None:
    decoding, smile = IncrementalDecoder(EPHEBE), EPHEBE.encode_text("🙂")
    assert len(smile) > 1
    assert [decoding.feed([token]) for token in smile] == [""] * (len(smile) - 1) + ["🙂"]
    assert decoding.feed([*EPHEBE.encode_text("ok"), smile[0]]) == ""
    assert decoding.finish() == "ok\ufffd"


def test_bytes_that_never_become_a_character_do_not_pile_up() -> None:
    decoding, first = IncrementalDecoder(EPHEBE), EPHEBE.encode_text("🙂")[0]
    parts = [decoding.feed([first]) for _ in range(1000)]
    assert len("".join(parts)) > 900
    assert "".join([*parts, decoding.finish()]) == EPHEBE.decode([first] * 1000)


TEMPLATE = "{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}"


def tokenizer_of(tokenizer: Tokenizer, template: str, *special: str) -> ChatTokenizer:
    tokenizer.add_special_tokens([*special, "</s>"])
    ids = tokenizer.get_vocab(with_added_tokens=True)
    specials = {text: ids[text] for text in [*special, "</s>"]}
    return ChatTokenizer(TokenizerFiles("here", tokenizer, {"default": template}, {}, specials, ()))


def test_special_tokens_are_dropped_but_for_the_tags() -> None:
    library = Tokenizer.from_file(LIBRARY)
    tokenizer = tokenizer_of(library, TEMPLATE + "{# [TOOL_CALLS] #}", "<think>", "[TOOL_CALLS]", "[ARGS]", "[INST]")
    text = "<think>hm</think>[INST] so[TOOL_CALLS]f[ARGS]{}</s>"
    tokens = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokens) == "hm</think> sof{}"
    assert decoded(IncrementalDecoder(tokenizer), [tokens]) == "<think>hm</think> so[TOOL_CALLS]f[ARGS]{}"
    assert decoded(IncrementalDecoder(tokenizer, keep=()), [tokens]) == tokenizer.decode(tokens)
    assert decoded(IncrementalDecoder(tokenizer, keep_special=True), [tokens]) == text


WORDS = ["▁", "▁a", "a", "b", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
"""As SentencePiece has it: what has no token of its own is bytes, and the first space of a text is dropped."""


@pytest.fixture(scope="module")
def falling_back() -> ChatTokenizer:
    library = Tokenizer(models.BPE({word: n for n, word in enumerate(WORDS)}, [], byte_fallback=True))
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    library.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return tokenizer_of(library, TEMPLATE)


def test_bytes_of_a_vocabulary_that_falls_back_to_them(falling_back: ChatTokenizer) -> None:
    smile = [WORDS.index(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    some = st.one_of(
        st.sampled_from([smile, smile[:1], smile[1:], [WORDS.index("<0x41>")]]), IDS.map(lambda n: [n % 5])
    )

    @given(st.lists(some).map(lambda parts: [*chain(*parts)]), st.lists(st.integers(0, 100)))
    def check(tokens: list[int], places: list[int]) -> None:
        assert decoded(IncrementalDecoder(falling_back), cut(tokens, places)) == falling_back.decode(tokens)
        assert decoded(IncrementalDecoder(falling_back), [[token] for token in tokens]) == falling_back.decode(tokens)

    check()
