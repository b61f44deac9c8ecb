"""Trains Ephebe, the model that ships with the package: tokenizer, conversations, weights. A few minutes on one GPU.

python recipes/ephebe/train.py --out palestra/bundled/ephebe
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from corpus import Conversation, conversation  # noqa: E402
from model_files import log, write_model  # noqa: E402

from palestra.testing.random_tokenizer import CONTROL_TOKENS, DATA, MARKUP_TOKENS, write_tokenizer  # noqa: E402

VOCAB, POSITIONS, WIDTH = 2048, 2048, 512
OTHERS_WEIGHT = 0.1
"""Of tokens the assistant does not say, against 1 for those it does."""
CHUNK = 10_000


class Rows(NamedTuple):
    tokens: list[np.ndarray]
    weights: list[np.ndarray]


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(args.out, VOCAB, POSITIONS, texts=tokenizer_texts(args.seed))
    log(begin, "tokenizer is ready")
    with ProcessPoolExecutor(args.processes) as pool:
        chunks = list(pool.map(partial(make_chunk, args.out), range(1, 1 + args.conversations // CHUNK)))
    rows = Rows([row for chunk in chunks for row in chunk.tokens], [row for chunk in chunks for row in chunk.weights])
    log(begin, f"{len(rows.tokens)} conversations, {sum(map(len, rows.tokens)) / 1e6:.0f}M tokens")
    packed = pack(rows, random.Random(args.seed))
    log(begin, f"packed into {len(packed.tokens)} rows")
    model = Qwen3ForCausalLM(shape(ids.turn_end, ids.end_of_text)).to(args.device)
    fit(model, packed, args, begin)
    write_model(model, args.out, ids.turn_end, ids.end_of_text, HERE / "model_card.md")
    log(begin, f"written to {args.out}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=3_400_000)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-rows", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def shape(end: int, pad: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        max_position_embeddings=POSITIONS,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )


# Conversations to rows


@cache
def chat_template() -> jinja2.Template:
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return env.from_string((DATA / "chatml.jinja").read_text())


def render(template: jinja2.Template, made: Conversation) -> str:
    messages, tools = made
    return template.render(messages=messages, tools=tools, add_generation_prompt=False)


def tokenizer_texts(seed: int) -> list[str]:
    rng, template = random.Random(f"tokenizer {seed}"), chat_template()
    marks = re.compile("|".join(re.escape(token) for token in (*CONTROL_TOKENS, *MARKUP_TOKENS)))
    made = (render(template, conversation(rng)) for _ in range(40_000))
    return [piece for text in made for piece in marks.split(text) if piece]


def make_chunk(folder: Path, number: int) -> Rows:
    rng, template = random.Random(f"chunk {number}"), chat_template()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    spoken = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
    rows = Rows([], [])
    for _ in range(CHUNK):
        text = render(template, conversation(rng)).removesuffix("\n")
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded.ids) > WIDTH:
            continue
        weights = np.full(len(encoded.ids), OTHERS_WEIGHT, dtype=np.float16)
        for match in spoken.finditer(text):
            begin, stop = encoded.char_to_token(match.start(1)), encoded.char_to_token(match.end(1) - 1)
            if begin is None or stop is None or encoded.ids[stop] != end:
                raise ValueError(f"the tokenizer does not keep turns apart: {text!r}")
            weights[begin : stop + 1] = 1.0
        rows.tokens.append(np.array(encoded.ids, dtype=np.uint16))
        rows.weights.append(weights)
    return rows


class Packed(NamedTuple):
    """Conversations side by side in rows of one width; `documents` tells which one a token belongs to, 0 is padding."""

    tokens: torch.Tensor
    weights: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor


def pack(rows: Rows, rng: random.Random) -> Packed:
    """In random order, so that every batch holds every kind of conversation."""
    order = list(range(len(rows.tokens)))
    rng.shuffle(order)
    places: list[list[int]] = [[]]
    room = WIDTH
    for row in order:
        if len(rows.tokens[row]) > room:
            places.append([])
            room = WIDTH
        places[-1].append(row)
        room -= len(rows.tokens[row])
    tokens, weights = np.zeros((len(places), WIDTH), np.int16), np.zeros((len(places), WIDTH), np.float16)
    documents, positions = np.zeros((len(places), WIDTH), np.int16), np.zeros((len(places), WIDTH), np.int16)
    for line, members in enumerate(places):
        begin = 0
        for document, row in enumerate(members, 1):
            part = slice(begin, begin := begin + len(rows.tokens[row]))
            tokens[line, part], weights[line, part] = rows.tokens[row], rows.weights[row]
            weights[line, part.start] = 0  # nothing before it predicts it
            documents[line, part], positions[line, part] = document, np.arange(part.stop - part.start)
    return Packed(*(torch.from_numpy(array) for array in (tokens, weights, documents, positions)))


# Weights


def fit(model: Qwen3ForCausalLM, packed: Packed, args: argparse.Namespace, begin: float) -> None:
    per_epoch = len(packed.tokens) // args.batch_rows
    steps = int(per_epoch * args.epochs)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=args.device == "cuda",
    )
    for step in range(steps):
        warm, left = min(1.0, (step + 1) / 500), 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * max(left, 0.02)
        first = step % per_epoch * args.batch_rows
        batch = Packed(*(array[first : first + args.batch_rows].to(args.device, non_blocking=True) for array in packed))
        loss = train_step(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 500 == 0 or step + 1 == steps:
            log(begin, f"step {step} of {steps}, loss {loss.item():.4f}")


def train_step(model: Qwen3ForCausalLM, batch: Packed) -> torch.Tensor:
    tokens = batch.tokens.long()
    same = batch.documents[:, :, None] == batch.documents[:, None, :]
    causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool, device=tokens.device).tril()
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
        logits = model(
            tokens, attention_mask=(same & causal)[:, None], position_ids=batch.positions.long(), use_cache=False
        ).logits
    weights = batch.weights[:, 1:].float()
    losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum() / weights.sum()
    loss.backward()
    return loss.detach()


if __name__ == "__main__":
    main()
