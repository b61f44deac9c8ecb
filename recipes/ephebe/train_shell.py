"""Trains Ephebe's sibling for the shell agent, from Ephebe, on recorded sessions. Minutes on one GPU.

python recipes/ephebe/shell_sessions.py --out sessions.xz
python recipes/ephebe/train_shell.py --sessions sessions.xz --asked-share 0.13 --out palestra/bundled/ephebe-shell

It needs nothing but this folder, Ephebe, torch, transformers and tokenizers. In half of the sessions files are called
by random letters, new ones each time, so that a name can only be copied.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import re
import shutil
import string
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

from model_files import log, write_model  # noqa: E402

POSITIONS, WIDTH = 8192, 640
EPHEBE = HERE.parent.parent / "palestra" / "bundled" / "ephebe"
CHUNK = 8192
"""Sessions that one process draws and packs at a time."""
RENAMED = 0.5
"""Share of the sessions whose files get new names."""
WARM_UP_STEPS = 100
PADDING, SHARED = -1, 0
"""Documents of tokens that belong to no session, and of those that belong to all in a row."""
SPOKEN = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>")
NAME = re.compile(r"[a-z0-9]+\.(?:txt|md|log|csv|sh)\b")

Row = dict[str, Any]


class Recording(NamedTuple):
    prompt: str
    """The system prompt, which all sessions share."""
    held_out: list[Row]
    sessions: list[Row]


class Packed(NamedTuple):
    """Rows that begin with the shared prompt, and go on with sessions side by side, each of which sees the prompt and
    itself."""

    tokens: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    is_spoken: np.ndarray
    """Whether the assistant says this token, and should learn it."""


class Batch(NamedTuple):
    """Some of such rows, on the device."""

    tokens: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor
    is_spoken: torch.Tensor


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    begin = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    recording = read_recording(args.sessions)
    log(begin, f"{len(recording.sessions)} sessions are read")
    tokenizer = write_tokenizer(args.out)
    with ProcessPoolExecutor(args.processes) as pool:
        make = partial(make_chunk, args.sessions, args.asked_share, args.seed)
        chunks = pool.map(make, range(chunk_count(args)))  # the processes begin before CUDA does
        model = Qwen3ForCausalLM.from_pretrained(EPHEBE, dtype=torch.float32).to(args.device)
        model.config.max_position_embeddings = POSITIONS
        fit(model, chunks, args, begin)
        pool.shutdown(wait=False, cancel_futures=True)
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    write_model(model, args.out, end, pad, HERE / "model_card_shell.md")
    log(begin, f"written to {args.out}")
    stored = Qwen3ForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(args.device)
    measure(stored, tokenizer, recording, args, begin)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sessions", type=Path, required=True, help="what shell_sessions.py has recorded")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="most minutes of training")
    parser.add_argument("--batch-rows", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument(
        "--asked-share", type=float, help="share of sessions with the command asked for; default: as recorded"
    )
    parser.add_argument("--samples", type=int, default=4, help="of each held-out task, to measure the model with")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@cache
def read_recording(path: Path) -> Recording:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        head = json.loads(next(file))
        return Recording(head["prompt"], head["held_out"], [json.loads(line) for line in file])


def write_tokenizer(folder: Path) -> Tokenizer:
    """Ephebe's, for more positions."""
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(EPHEBE / name, folder / name)
    config = json.loads((EPHEBE / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": POSITIONS}, indent=2) + "\n")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# Sessions to rows


def chunk_count(args: argparse.Namespace) -> int:
    """Enough for all steps: rows have four or five sessions."""
    return math.ceil(args.steps * args.batch_rows * 6 / CHUNK) + 1


def make_chunk(path: Path, asked_share: float | None, seed: int, number: int) -> Packed:
    recording = read_recording(path)
    rng = random.Random(f"chunk {seed} {number}")
    tokenizer = Tokenizer.from_file(str(EPHEBE / "tokenizer.json"))
    texts = [renamed(one, rng) for one in drawn(recording.sessions, asked_share, rng)]
    return pack(tokenizer, recording.prompt, texts)


def drawn(sessions: list[Row], asked_share: float | None, rng: random.Random) -> list[Row]:
    if asked_share is None:
        return rng.choices(sessions, k=CHUNK)
    asked = [one for one in sessions if one["is_asked"]]
    others = [one for one in sessions if not one["is_asked"]]
    return [rng.choice(asked if rng.random() < asked_share else others) for _ in range(CHUNK)]


def renamed(session: Row, rng: random.Random) -> str:
    """The session's text, in half of all cases with other names of its files."""
    if not session["names"] or rng.random() > RENAMED:
        return session["text"]
    names = {name: f"{random_stem(rng)}.{name.rpartition('.')[2]}" for name in session["names"]}
    return NAME.sub(lambda match: names.get(match[0], match[0]), session["text"])


def random_stem(rng: random.Random) -> str:
    letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))
    return letters + rng.choice(["", "", *string.digits[1:]])


def pack(tokenizer: Tokenizer, prompt: str, texts: list[str]) -> Packed:
    shared = tokenizer.encode(prompt, add_special_tokens=False).ids
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    places: list[list[int]] = [[]]
    space = WIDTH - len(shared)
    for number, one in enumerate(encoded):
        if len(one.ids) > space:
            places.append([])
            space = WIDTH - len(shared)
        places[-1].append(number)
        space -= len(one.ids)
    size = (len(places), WIDTH)
    tokens, positions = np.zeros(size, np.int16), np.zeros(size, np.int16)
    documents, is_spoken = np.full(size, PADDING, np.int16), np.zeros(size, np.bool_)
    tokens[:, : len(shared)], positions[:, : len(shared)] = shared, range(len(shared))
    documents[:, : len(shared)] = SHARED
    for line, members in enumerate(places):
        begin = len(shared)
        for document, number in enumerate(members, SHARED + 1):
            one = encoded[number]
            part = slice(begin, begin := begin + len(one.ids))
            tokens[line, part], documents[line, part] = one.ids, document
            positions[line, part] = np.arange(len(shared), len(shared) + len(one.ids))
            for first, last in spoken_parts(one, texts[number]):
                is_spoken[line, part.start + first : part.start + last + 1] = True
    return Packed(tokens, documents, positions, is_spoken)


def spoken_parts(encoded: Any, text: str) -> Iterator[tuple[int, int]]:
    """First and last token of each of the assistant's turns."""
    for match in SPOKEN.finditer(text):
        first, last = encoded.char_to_token(match.start(1)), encoded.char_to_token(match.end(1) - 1)
        assert first is not None
        assert last is not None
        yield first, last


# Weights


def fit(model: Qwen3ForCausalLM, chunks: Iterator[Packed], args: argparse.Namespace, begin: float) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=args.device == "cuda"
    )
    first_batch = time.monotonic()
    for step, batch in enumerate(batches(chunks, args)):
        done = max(step / args.steps, (time.monotonic() - first_batch) / 60 / args.minutes)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = (
                args.lr * min(1.0, (step + 1) / WARM_UP_STEPS) * max(0.5 * (1 + math.cos(math.pi * done)), 0.01)
            )
        loss = train_step(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0:
            log(begin, f"step {step}, {done:.0%} done, loss {loss.item():.4f}")


def batches(chunks: Iterator[Packed], args: argparse.Namespace) -> Iterator[Batch]:
    for chunk in chunks:
        here = Batch(*(torch.from_numpy(array).to(args.device) for array in chunk))
        for first in range(0, len(chunk.tokens) - args.batch_rows + 1, args.batch_rows):
            yield Batch(*(array[first : first + args.batch_rows] for array in here))


def train_step(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    tokens, documents = batch.tokens.long(), batch.documents
    queries, keys = documents[:, :, None], documents[:, None, :]
    causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool, device=tokens.device).tril()
    mask = ((queries == keys) | (keys == SHARED)) & causal
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
        hidden = model.model(
            tokens, attention_mask=mask[:, None], position_ids=batch.positions.long(), use_cache=False
        ).last_hidden_state
        learned = batch.is_spoken[:, 1:]
        logits = model.lm_head(hidden[:, :-1][learned])
    loss = F.cross_entropy(logits.float(), tokens[:, 1:][learned])
    loss.backward()
    return loss.detach()


# What it can do


@torch.no_grad()
def measure(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, recording: Recording, args: argparse.Namespace, begin: float
) -> None:
    """Samples first answers to held-out tasks at temperature 1 and prints how many are right in which respect."""
    tasks = [task for task in recording.held_out for _ in range(args.samples)]
    commands = [command_in(text) for text in sampled(model, tokenizer, recording.prompt, tasks)]
    calls = [(task, one) for task, one in zip(tasks, commands, strict=True) if one is not None]
    acts = [(task, one) for task, one in calls if one != "ls"]
    counts = {
        "answers call the tool, well formed": (len(calls), len(tasks)),
        "of calls only look around": (len(calls) - len(acts), len(calls)),
        "of other commands name the files exactly": (sum(names_files(*one) for one in acts), len(acts)),
        "of other commands fit files and words exactly": (
            sum(one in task["commands"] for task, one in acts),
            len(acts),
        ),
        "of all answers are the command asked for": (sum(one == task["solution"] for task, one in acts), len(tasks)),
    }
    for what, (count, total) in counts.items():
        log(begin, f"{count / max(total, 1):6.1%} {what} ({count} of {total})")
    for task, command in list(zip(tasks, commands, strict=True))[:: args.samples][:24]:
        log(begin, f"{task['instruction'].split(chr(10))[1].removesuffix('<|im_end|>')}  $ {command}")


def sampled(model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str, tasks: list[Row]) -> list[str]:
    encoded = [
        tokenizer.encode(f"{prompt}{task['instruction']}<|im_start|>assistant\n", add_special_tokens=False).ids
        for task in tasks
    ]
    width, pad = max(map(len, encoded)), tokenizer.token_to_id("<|endoftext|>")
    tokens = torch.tensor([[pad] * (width - len(one)) + one for one in encoded], device=model.device)
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in encoded], device=model.device)
    made = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=64, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    texts = (tokenizer.decode(row, skip_special_tokens=False) for row in made[:, width:].tolist())
    return [text.partition("<|im_end|>")[0] for text in texts]


def command_in(text: str) -> str | None:
    """The command of a well-formed call, if the text is one."""
    match = CALL.fullmatch(text)
    try:
        call = json.loads(match[1]) if match else None
        command = call["arguments"]["command"] if call and call["name"] == "bash" else None
    except (ValueError, KeyError, TypeError):
        return None
    return command if isinstance(command, str) else None


def names_files(task: Row, command: str) -> bool:
    """Whether a command names the task's files and no others."""
    return set(NAME.findall(command)) == set(task["names"])


if __name__ == "__main__":
    main()
