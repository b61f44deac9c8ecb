"""Random models whose tokenizers the GGUF format has, and what their GGUF files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.decoders import ByteFallback, Fuse, Replace
from tokenizers.decoders import Sequence as InSequence
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from palestra.testing.random_tokenizer import corpus

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "Hello world, it's 12345 o'clock! <|im_start|>user\nWhat?<|im_end|>\n",
    "  Several   spaces\n\n\tand tabs; don't WE'LL naïve café 你好 🙂",
    "def f(x):\n    return x**2  # 3.14",
]


def with_qwen_words(base: Path, folder: Path) -> Path:
    """A copy of a random model that splits text as Qwen does."""
    shutil.copytree(base, folder)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN2
    file.write_text(json.dumps(raw))
    return folder


def with_sentencepiece(base: Path, folder: Path) -> Path:
    """A copy of a random model with a tokenizer as Gemma's: no words, spaces as ▁, bytes for unknown characters."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    trained = Tokenizer(BPE())
    trained.normalizer = normalizers.Replace(Regex(" "), "\u2581")
    trained.train_from_iterator(corpus().splitlines()[:200], BpeTrainer(vocab_size=config["vocab_size"] - 260))
    raw = json.loads(trained.to_str())
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = [*specials, *(f"<0x{n:02X}>" for n in range(256)), *raw["model"]["vocab"]]
    model = BPE(
        {piece: n for n, piece in enumerate(pieces)},
        [tuple(pair) for pair in raw["model"]["merges"]],
        byte_fallback=True,
        fuse_unk=True,
        unk_token="<unk>",
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = InSequence([Replace("\u2581", " "), ByteFallback(), Fuse()])
    made.add_special_tokens(specials)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | {f"{name[1:-1]}_token": name for name in specials})
    )
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 1, "pad_token_id": 0}))
    return folder


def metadata(file: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(file).fields.items()}
