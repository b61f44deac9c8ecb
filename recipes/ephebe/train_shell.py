"""Trains Ephebe's sibling for the shell agent, from Ephebe, on recorded sessions. Tens of minutes on two CPU cores.

python recipes/ephebe/train_shell.py --out palestra/bundled/ephebe-shell
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from shell_sessions import conversation  # noqa: E402
from train import OTHERS_WEIGHT, chat_template, log, render, write_model  # noqa: E402

from palestra.agents.shell_agent import TOOL  # noqa: E402
from palestra.model.loading.random_tokenizer import write_tokenizer_files  # noqa: E402

POSITIONS, WIDTH = 8192, 640
EPHEBE = ROOT / "palestra" / "bundled" / "ephebe"
SPOKEN = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)


class Session(NamedTuple):
    """What follows the system prompt, which all sessions share."""

    tokens: list[int]
    weights: list[float]


class Batch(NamedTuple):
    """Rows that begin with the shared prompt, and go on with sessions side by side, each of which sees the prompt and
    itself."""

    tokens: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        texts = list(pool.map(session_text, range(args.sessions), chunksize=100))
    log(begin, f"{len(texts)} sessions are recorded")
    tokenizer = Tokenizer.from_file(str(EPHEBE / "tokenizer.json"))
    ids = write_tokenizer_files(args.out, tokenizer, POSITIONS)
    model = Qwen3ForCausalLM.from_pretrained(EPHEBE, dtype=torch.float32).to(args.device)
    model.config.max_position_embeddings = POSITIONS
    fit(model, tokenizer, texts, args, begin)
    write_model(model, args.out, ids.turn_end, ids.end_of_text, HERE / "model_card_shell.md")
    log(begin, f"written to {args.out}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=24_000)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def session_text(number: int) -> str:
    return render(chat_template(), (conversation(number), [TOOL])).removesuffix("\n")


# Sessions to batches


def split_at_prompt(text: str) -> tuple[str, str]:
    """The system prompt, and the session."""
    prompt, mark, session = text.partition("<|im_start|>user")
    return prompt, mark + session


def encoded(tokenizer: Tokenizer, text: str) -> Session:
    found = tokenizer.encode(text, add_special_tokens=False)
    weights = [OTHERS_WEIGHT] * len(found.ids)
    for match in SPOKEN.finditer(text):
        first, last = found.char_to_token(match.start(1)), found.char_to_token(match.end(1) - 1)
        assert first is not None
        assert last is not None
        weights[first : last + 1] = [1.0] * (last + 1 - first)
    return Session(found.ids, weights)


def packed(sessions: list[Session], room: int) -> list[list[Session]]:
    rows: list[list[Session]] = [[]]
    left = room
    for one in sessions:
        if len(one.tokens) > left:
            rows.append([])
            left = room
        rows[-1].append(one)
        left -= len(one.tokens)
    return rows


def batch_of(prompt: list[int], rows: list[list[Session]]) -> Batch:
    tokens, positions = torch.zeros(len(rows), WIDTH, dtype=torch.long), torch.zeros(len(rows), WIDTH, dtype=torch.long)
    weights, documents = torch.zeros(len(rows), WIDTH), torch.full((len(rows), WIDTH), -1)
    tokens[:, : len(prompt)], positions[:, : len(prompt)] = torch.tensor(prompt), torch.arange(len(prompt))
    documents[:, : len(prompt)] = 0
    for line, sessions in enumerate(rows):
        begin = len(prompt)
        for number, one in enumerate(sessions, 1):
            part = slice(begin, begin := begin + len(one.tokens))
            tokens[line, part], weights[line, part] = torch.tensor(one.tokens), torch.tensor(one.weights)
            positions[line, part] = torch.arange(len(prompt), len(prompt) + len(one.tokens))
            documents[line, part] = number
            weights[line, part.start] = 0.0  # what is before it in the row is another session
    queries, keys = documents[:, :, None], documents[:, None, :]
    causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()
    mask = ((queries == keys) | (keys == 0)) & causal
    return Batch(tokens, weights, positions, mask[:, None])


# Weights


def fit(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, texts: list[str], args: argparse.Namespace, begin: float
) -> None:
    prompt = tokenizer.encode(split_at_prompt(texts[0])[0], add_special_tokens=False).ids
    sessions = [encoded(tokenizer, split_at_prompt(text)[1]) for text in texts]
    random.Random(args.seed).shuffle(sessions)
    rows = packed(sessions, WIDTH - len(prompt))
    steps = len(rows) // args.batch_rows
    mean = sum(len(one.tokens) for one in sessions) / len(sessions)
    log(begin, f"a prompt of {len(prompt)} tokens, sessions of {mean:.0f}; {steps} steps")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 20) * max(0.5 * (1 + math.cos(math.pi * step / steps)), 0.02)
        batch = batch_of(prompt, rows[step * args.batch_rows : (step + 1) * args.batch_rows])
        batch = Batch(*(one.to(args.device) for one in batch))
        loss = train_step(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step + 1 == steps:
            log(begin, f"step {step} of {steps}, loss {loss:.4f}")


def train_step(model: Qwen3ForCausalLM, batch: Batch) -> float:
    hidden = model.model(
        batch.tokens, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    weights = batch.weights[:, 1:]
    counted = weights > 0  # the output layer is a fifth of the work, and padding needs none of it
    logits = model.lm_head(hidden[:, :-1][counted])
    losses = F.cross_entropy(logits, batch.tokens[:, 1:][counted], reduction="none")
    loss = (losses * weights[counted]).sum() / weights.sum()
    loss.backward()
    return loss.item()


if __name__ == "__main__":
    main()
