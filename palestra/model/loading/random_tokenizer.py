"""A small, real byte-level BPE tokenizer with ChatML, trained on the corpus that ships beside this file, or on another.

Owns: tokenizer.json, tokenizer_config.json, chat_template.jinja of random models and of the bundled one. Never
touches: weights, transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

DATA = Path(__file__).with_name("data")

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens too, but ordinary text: decoding shows them."""

SMALLEST_VOCAB = 256 + len(CONTROL_TOKENS) + len(MARKUP_TOKENS)

# Words keep their leading space, digits stand alone (so numbers of any length look alike), newlines end a piece.
WORD_PATTERN = r"'[a-z]{1,2}|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class TokenizerIds:
    end_of_text: int
    turn_end: int


def write_tokenizer(
    folder: Path, vocab_size: int, max_positions: int, texts: Iterable[str] | None = None
) -> TokenizerIds:
    """`texts` to train on, without control tokens. Default: the corpus beside this file."""
    tokenizer = _train(vocab_size, texts or [(DATA / "corpus.txt").read_text(encoding="utf-8")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "errors": "replace",
        "model_max_length": max_positions,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(DATA / "chatml.jinja", folder / "chat_template.jinja")
    return TokenizerIds(
        end_of_text=_id_of(tokenizer, END_OF_TEXT),
        turn_end=_id_of(tokenizer, TURN_END),
    )


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    return tokenizer.get_vocab(with_added_tokens=True)[token]


def _train(vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    if vocab_size < SMALLEST_VOCAB:
        raise ValueError(f"vocab_size {vocab_size} is too small: bytes and control tokens alone need {SMALLEST_VOCAB}")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(WORD_PATTERN), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        # The whole byte alphabet, so that any text encodes and ids 0-255 do not depend on the corpus.
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP_TOKENS])
    return tokenizer
