"""A small, real byte-level BPE tokenizer with ChatML, trained on the corpus that ships beside this file, or on
another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as InSequence
from tokenizers.trainers import BpeTrainer

DATA = Path(__file__).with_name("data")

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens too, but ordinary text: decoding shows them."""

IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
GEMMA_IMAGE_TOKENS = ("<|image>", "<|image|>", "<image|>")
"""Control tokens of models that see: those around a picture, and the one that stands for each of its positions."""

SMALLEST_VOCAB = 256 + len(CONTROL_TOKENS) + len(MARKUP_TOKENS)

# Words keep their leading space, digits stand alone (so numbers of any length look alike), newlines end a piece.
WORD_PATTERN = r"'[a-z]{1,2}|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class ImageTokenIds:
    start: int
    image: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenizerIds:
    end_of_text: int
    turn_end: int
    image: ImageTokenIds | None = None
    """Tokens of models that see."""


def corpus() -> str:
    return (DATA / "corpus.txt").read_text(encoding="utf-8")


def write_tokenizer(
    folder: Path, vocab_size: int, max_positions: int, texts: Iterable[str] | None = None, *, images: Sequence[str] = ()
) -> TokenizerIds:
    """`texts` to train on, without control tokens. Default: the corpus beside this file. `images`: the family's tokens
    of pictures."""
    smallest = SMALLEST_VOCAB + len(images)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size {vocab_size} is too small: bytes and control tokens alone need {smallest}")
    tokenizer = train_bpe(vocab_size - len(CONTROL_TOKENS) - len(MARKUP_TOKENS) - len(images), texts or [corpus()])
    return write_tokenizer_files(folder, with_control_tokens(tokenizer, more=images), max_positions)


def write_tokenizer_files(
    folder: Path, tokenizer: Tokenizer, max_positions: int, chat_template: str | None = None
) -> TokenizerIds:
    """`chat_template`: the text of a Jinja template. Default: ChatML with Hermes tools."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
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
    template = (DATA / "chatml.jinja").read_text(encoding="utf-8") if chat_template is None else chat_template
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    images = next((texts for texts in (IMAGE_TOKENS, GEMMA_IMAGE_TOKENS) if texts[0] in vocab), None)
    image = None if images is None else ImageTokenIds(*(vocab[text] for text in images))
    return TokenizerIds(end_of_text=vocab[END_OF_TEXT], turn_end=vocab[TURN_END], image=image)


def train_bpe(vocab_size: int, texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = InSequence(
        [
            Split(Regex(WORD_PATTERN), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        # The whole byte alphabet, so that any text encodes and ids 0-255 do not depend on the corpus.
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_control_tokens(
    tokenizer: Tokenizer, markup: Sequence[str] = MARKUP_TOKENS, more: Sequence[str] = ()
) -> Tokenizer:
    """`more`: control tokens beside the usual ones."""
    tokenizer.decoder = ByteLevelDecoder()
    control = (*CONTROL_TOKENS, *more)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in markup])
    return tokenizer
