"""Teaches a model of any shape Ephebe's language: the same tokenizer and conversations, for benchmarks on a GPU.

python recipes/ephebe/train_large.py --out models/ephebe-0.6b                      # the 0.6B shape; minutes on an H200
python recipes/ephebe/train_large.py --out micro --shape micro --conversations 20000 --device cpu

It needs nothing but this repository, torch, transformers and tokenizers: no network. All weights are trained, from
nothing; the demonstrations are as imperfect as Ephebe's, so that reinforcement learning has something to do.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from model_files import log  # noqa: E402
from train import CHUNK, Rows, fit, make_chunk, pack  # noqa: E402

from palestra.testing.random_model import SHAPES, random_config  # noqa: E402

EPHEBE = ROOT / "palestra" / "bundled" / "ephebe"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
GENERATION = "generation_config.json"


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copyfile(EPHEBE / name, args.out / name)
    with ProcessPoolExecutor(args.processes) as pool:
        chunks = list(pool.map(partial(make_chunk, args.out), range(1, 1 + max(1, args.conversations // CHUNK))))
    rows = Rows([row for chunk in chunks for row in chunk.tokens], [row for chunk in chunks for row in chunk.weights])
    log(begin, f"{len(rows.tokens)} conversations, {sum(map(len, rows.tokens)) / 1e6:.0f}M tokens")
    model = Qwen3ForCausalLM(config_of(args.shape)).to(args.device)
    log(begin, f"{sum(one.numel() for one in model.parameters()) / 1e6:.0f}M parameters")
    fit(model, pack(rows, random.Random(args.seed)), args, begin)
    model.to(torch.bfloat16).save_pretrained(args.out)
    shutil.copyfile(EPHEBE / GENERATION, args.out / GENERATION)
    log(begin, f"written to {args.out}; try: palestra eval arithmetic stockroom --model {args.out}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--conversations", type=int, default=400_000)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-rows", type=int, default=32)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def config_of(shape: str) -> Qwen3Config:
    """The shape as published, vocabulary included, though only Ephebe's tokens are ever used."""
    known = json.loads((EPHEBE / "config.json").read_text())
    tokens = {name: known[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = SHAPES[shape]
    vocab = max(sizes.vocab, known["vocab_size"])
    return Qwen3Config(**random_config("qwen3", sizes, vocab, tie=True), **tokens)


if __name__ == "__main__":
    main()
