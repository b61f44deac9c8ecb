"""No token stands for more text than it is said to; where nothing bounds that, nothing is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from palestra.chat import ChatTokenizer
from palestra.chat.token_lengths import FALLBACK, longest_text
from palestra.config.bundled import bundled_model

FOLDER = bundled_model("ephebe") or Path()
EPHEBE = ChatTokenizer.load(FOLDER)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
ANGSTROM = "\u0391\u0313\u0300\u0345"
"""Four characters that NFC makes one of."""


def by_bytes(*more: str) -> Tokenizer:
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(BPE({text: number for number, text in enumerate([*sorted(letters), *more])}, []))
    tokenizer.pre_tokenizer = BYTES
    return tokenizer


def by_characters(*words: str) -> Tokenizer:
    vocabulary = {text: number for number, text in enumerate(["[U]", *FALLBACK, *words])}
    return Tokenizer(BPE(vocabulary, [], byte_fallback=True, unk_token="[U]", fuse_unk=True))


@given(st.text() | st.sampled_from(["ab ", " ", "\n", "<|im_end|>", "né", "漢"]).map(lambda text: text * 50))
@example("</tool_response>")
def test_no_token_of_a_real_vocabulary_is_longer(text: str) -> None:
    longest = longest_text(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))
    assert longest is not None
    assert len(text) <= longest * len(EPHEBE.encode_text(text))


def test_what_is_bounded() -> None:
    assert longest_text(by_bytes("\u0120" * 7)) == 7
    assert longest_text(by_characters("\u2581" * 9)) == 9
    composing = by_bytes()
    composing.normalizer = normalizers.NFC()
    assert longest_text(composing) == 4
    assert len(normalizers.NFC().normalize_str(ANGSTROM)) == 1
    replacing = by_characters()
    replacing.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    assert longest_text(replacing) == len(FALLBACK[0])


def changed(**parts: Any) -> Tokenizer:
    tokenizer = by_bytes()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def test_what_may_drop_text_or_not_know_it_is_not() -> None:
    swallowing = by_bytes()
    swallowing.add_special_tokens([AddedToken("<e>", rstrip=True)])
    unbounded = [
        Tokenizer(WordLevel({"[U]": 0}, unk_token="[U]")),
        Tokenizer(BPE({"a": 0, "[U]": 1}, [], unk_token="[U]", fuse_unk=True)),
        changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        changed(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])),
        changed(normalizer=normalizers.Strip()),
        changed(normalizer=normalizers.Replace("  ", " ")),
        swallowing,
    ]
    assert [longest_text(tokenizer) for tokenizer in unbounded] == [None] * len(unbounded)
