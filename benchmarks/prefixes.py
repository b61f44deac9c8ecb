"""Training on data that share their beginnings, with and without computing these once.

    python benchmarks/prefixes.py --quick
    python benchmarks/prefixes.py --rows group,branches,nothing --json
    python benchmarks/prefixes.py --device cuda --shape qwen3-4b
    python benchmarks/prefixes.py --device cuda --rows turns --rounds 2

Tokens a second are those of the data: what is shared counts for each datum that has it.

| row | data |
| --- | --- |
| group | prompts with 16 answers each, as a step of GRPO has them |
| branches | conversations of 8 turns, each turn a datum: it reads what was said before, but not what was thought |
| turns | the shell agent as recorded (`traces/record.py`), groups of 16 rollouts, up to 8 turns: each turn is a datum |
| rollouts | the same, each rollout a datum |
| nothing | the answers' lengths, with prompts of their own |
"""

from __future__ import annotations

import json
import lzma
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from harness import Progress, Report, Row, alternate, argument_parser, machine, report, some_of, versions
from numpy.typing import NDArray

from palestra.model import AdapterPool, Trainer, TrainItem, encode, load_model
from palestra.model.numerics import set_numerics
from palestra.testing.random_model import SHAPES, make_random_model
from palestra.types import Datum, LoraConfig

ROWS = ("group", "branches", "turns", "rollouts", "nothing")
TRACE = Path(__file__).parent / "traces" / "shell_agent.json.xz"
TURNS = 8
RANK = 32

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Size:
    prompts: int
    prompt: int
    answers: int
    answer: int
    groups: int
    """How many groups of the recorded trace a pass has."""
    goals: dict[str, float]
    """The least ratio of each row."""


CPU = Size(8, 512, 16, 64, 1, {"group": 3.0, "nothing": 0.97})
QUICK = Size(2, 512, 16, 64, 1, {})
GPU = Size(32, 1024, 16, 256, 4, {"group": 2.8, "branches": 2.5, "turns": 2.5, "nothing": 0.97})


def main() -> None:
    parser = argument_parser("prefixes", "Training on data that share their beginnings.")
    parser.add_argument("--rows", type=some_of("rows", ROWS), default=list(ROWS), metavar="NAME,…")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), help="[tiny on a CPU, qwen3-4b on a GPU]")
    parser.add_argument("--family", default="qwen3")
    args = parser.parse_args()
    size = QUICK if args.quick else GPU if args.device == "cuda" else CPU
    shape = args.shape or ("qwen3-4b" if args.device == "cuda" else "tiny")
    progress = Progress()
    if args.device == "cuda":
        set_numerics("exact")
    with tempfile.TemporaryDirectory() as scratch:
        progress.doing("making the model")
        dtype = "bfloat16" if args.device == "cuda" else "float32"
        folder = make_random_model(Path(scratch) / "model", family=args.family, shape=shape, dtype=dtype)
        bench = Bench(folder, args.device)
        rows = []
        for name in args.rows:
            rows.append(bench.row(name, size, args.rounds or (1 if args.quick else 5), progress))
            progress.say(f"{rows[-1].what}: {rows[-1].ours.median:,.0f} tok/s, {rows[-1].ratio:.2f}x")
    progress.done()
    notes = [f"{args.family}, shape {shape}, one adapter of rank {RANK}, cross-entropy on the answers"]
    report(Report("prefixes", machine(), versions(("palestra", "torch")), rows, notes), json_line=args.json)


class Bench:
    def __init__(self, folder: Path, device: str) -> None:
        self.model = load_model(folder, device=device)
        self.pool = AdapterPool(
            self.model.spec, dtype=self.model.decoder.dtype, device=self.model.decoder.device, max_rank=64
        )
        self.adapter = self.pool.create(LoraConfig(rank=RANK, seed=0))

    def row(self, name: str, size: Size, rounds: int, progress: Progress) -> Row:
        data = DATA[name](np.random.default_rng(0), self.model.spec.vocab_size, size)
        items = [TrainItem(self.adapter, datum) for datum in data]
        trainers = {share: Trainer(self.model.decoder, self.pool, share_prefixes=share) for share in (True, False)}
        computed, tokens = (
            sum(batch.rows for batch in trainers[share].plan(trainers[share].prepare(items, train=True)))
            for share in (True, False)
        )
        contenders = {
            "shared": self._contender(trainers[True], items, tokens),
            "alone": self._contender(trainers[False], items, tokens),
        }
        found = alternate(contenders, rounds, warmups=1, progress=progress)
        what = f"{name}: {len(data)} data, {tokens:,} tokens, {computed:,} computed"
        return Row(what, "tok/s", found["shared"], "ours, nothing shared", found["alone"], size.goals.get(name))

    def _contender(self, trainer: Trainer, items: list[TrainItem], tokens: int) -> Callable[[], float]:
        def run() -> float:
            self._wait()
            start = time.perf_counter()
            trainer.forward_backward(items)
            self._wait()
            return tokens / (time.perf_counter() - start)

        return run

    def _wait(self) -> None:
        if self.model.decoder.device.type == "cuda":
            torch.cuda.synchronize()


def group(rng: np.random.Generator, vocab: int, size: Size) -> list[Datum]:
    return [
        datum(prompt, rng.integers(0, vocab, size.answer))
        for prompt in rng.integers(0, vocab, (size.prompts, size.prompt))
        for _ in range(size.answers)
    ]


def branches(rng: np.random.Generator, vocab: int, size: Size) -> list[Datum]:
    """As agents send them whose chat template drops earlier thoughts: all turns of a conversation branch off it."""
    first, thought, length = size.prompt // 2, size.answer // 2, size.answer // 2
    made = []
    for _ in range(size.prompts):
        prompt = rng.integers(0, vocab, first)
        for _ in range(size.answers // 4):
            read = prompt
            for _ in range(TURNS):
                answer = rng.integers(0, vocab, length)
                made.append(datum(read, np.concatenate([rng.integers(0, vocab, thought), answer])))
                read = np.concatenate([read, answer, rng.integers(0, vocab, length)])  # and what a tool returned
    return made


def turns(rng: np.random.Generator, vocab: int, size: Size) -> list[Datum]:
    """As clients send them that make a datum of each call of the model: it reads all turns before."""
    made = []
    for prompt, rollout in recorded_rollouts(rng, vocab, size):
        read = prompt
        for observation, answer in rollout:
            read = np.concatenate([read, observation])
            made.append(datum(read, answer))
            read = np.concatenate([read, answer])
    return made


def rollouts(rng: np.random.Generator, vocab: int, size: Size) -> list[Datum]:
    """As our trainer sends them: turns that continue each other are one datum."""
    made = []
    for prompt, rollout in recorded_rollouts(rng, vocab, size):
        parts = [prompt, *(part for turn in rollout for part in turn)]
        is_sampled = [n > 0 and n % 2 == 0 for n in range(len(parts))]
        weights = np.concatenate([np.full(len(p), s, np.float32) for p, s in zip(parts, is_sampled, strict=True)])
        made.append(weighted(np.concatenate(parts), weights[1:]))
    return made


def recorded_rollouts(rng: np.random.Generator, vocab: int, size: Size) -> Iterator[tuple[Tokens, list[list[Tokens]]]]:
    """Prompts and turns of rollouts of the trace; its token ids are others of this vocabulary, each always the same."""
    ids = rng.permutation(vocab)
    for group in json.loads(lzma.decompress(TRACE.read_bytes()))[: size.groups]:
        for rollout in group["rollouts"]:
            turns = [[ids[np.array(part, np.int64)] for part in turn] for turn in rollout]
            yield ids[np.array(group["prompt"])], turns


def nothing(rng: np.random.Generator, vocab: int, size: Size) -> list[Datum]:
    lengths = rng.integers(size.answer, size.prompt + size.answer, size.prompts * size.answers // 2)
    return [datum(rng.integers(0, vocab, n - n // 2), rng.integers(0, vocab, n // 2)) for n in lengths]


DATA = {"group": group, "branches": branches, "turns": turns, "rollouts": rollouts, "nothing": nothing}


def datum(prompt: Tokens, answer: Tokens) -> Datum:
    tokens = np.concatenate([prompt, answer])
    return weighted(tokens, (np.arange(1, len(tokens)) >= len(prompt)).astype(np.float32))


def weighted(tokens: Tokens, weights: NDArray[np.float32]) -> Datum:
    return Datum.of_tokens(tokens[:-1].tolist(), target_tokens=encode(tokens[1:]), weights=encode(weights))


if __name__ == "__main__":
    main()
