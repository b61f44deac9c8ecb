"""Teaches a small model to see, from nothing, on a CPU: to describe drawings of circles, squares and bars.

python recipes/seeing/train.py --out seeing

It also learns how answers to the questions of the environment `drawings` look, but the answers that it is shown are
drawn at random: which one is right is left to reinforcement learning. The mean of the loss is over what the assistant
says.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from data import Example, example, texts  # noqa: E402
from model import POSITIONS, features_of, make_model, positions_of, write_model  # noqa: E402

from palestra.chat import ChatTokenizer  # noqa: E402
from palestra.chat.pictures import PictureMark  # noqa: E402
from palestra.testing.random_tokenizer import IMAGE_TOKENS, write_tokenizer  # noqa: E402

VOCAB, CONTEXT = 384, 512
MARK = PictureMark("0" * 64, POSITIONS)


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(args.out, VOCAB, CONTEXT, texts=texts(), images=IMAGE_TOKENS)
    rows = RowMaker(ChatTokenizer.load(args.out), args.described)
    model = make_model(ids, VOCAB, args.width, args.layers, args.depth)
    log(begin, f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")
    rng = random.Random(f"seeing {args.seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.02)
    losses: list[float] = []
    for step in range(args.steps):
        scale = min(1.0, (step + 1) / 100) * max(0.02, 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * scale
        loss = loss_of(model, rows, [example(rng, args.described) for _ in range(args.batch)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 100 == 99 or step + 1 == args.steps:
            log(begin, f"step {step + 1} of {args.steps}, loss {np.mean(losses[-100:]):.4f}")
            write_model(model, args.out, ids)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--described", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


class RowMaker:
    """Rows of tokens, as the model will read and say them."""

    def __init__(self, tokenizer: ChatTokenizer, described: float) -> None:
        self._tokenizer = tokenizer
        self._prompts: dict[str, list[int]] = {}
        self._answers: dict[str, list[int]] = {}

    def row(self, made: Example) -> tuple[list[int], int]:
        """The tokens, and how many of them are the prompt."""
        if made.question not in self._prompts:
            asked = [{"role": "user", "content": MARK.text + made.question}]
            self._prompts[made.question] = self._tokenizer.encode_chat(asked)
        if made.answer not in self._answers:
            self._answers[made.answer] = [*self._tokenizer.encode_text(made.answer), self._tokenizer.turn_end]
        prompt = self._prompts[made.question]
        return [*prompt, *self._answers[made.answer]], len(prompt)


def loss_of(model, rows: RowMaker, examples: list[Example]) -> Tensor:
    """Mean cross entropy of the answers' tokens."""
    made = [rows.row(one) for one in examples]
    length = max(len(tokens) for tokens, _ in made)
    pad, image = model.config.text_config.pad_token_id, model.config.image_token_id
    tokens = torch.full((len(made), length), pad)
    learned = torch.zeros(len(made), length, dtype=torch.bool)
    for line, (own, prompt) in enumerate(made):
        tokens[line, : len(own)] = torch.tensor(own)
        learned[line, prompt : len(own)] = True
    features = features_of(model, torch.from_numpy(np.stack([one.pixels for one in examples])))
    embedded = model.get_input_embeddings()(tokens)
    seen = (tokens == image)[..., None].expand_as(embedded)
    embedded = embedded.masked_scatter(seen, features)
    places = torch.stack([positions_of(line, image) for line in tokens], 1)
    hidden = model.model.language_model(inputs_embeds=embedded, position_ids=places, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][learned[:, 1:]])
    return F.cross_entropy(logits, tokens[:, 1:][learned[:, 1:]])


def log(begin: float, text: str) -> None:
    print(f"{time.monotonic() - begin:7.1f} s  {text}", flush=True)


if __name__ == "__main__":
    main()
