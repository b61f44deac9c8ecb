"""How fast the compute core samples and trains, beside transformers and PEFT in the same run.

    python benchmarks/compute.py --quick
    python benchmarks/compute.py --rows sample_ragged,train_ragged --shape small --json
    python benchmarks/compute.py --device cuda

Owns: the rows, their workloads and targets. Never touches: how contenders are chosen and timed (`peers/contest.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import Progress, Report, Row, argument_parser, machine, report, some_of, versions
from peers.contest import Contest, Target
from peers.workloads import SampleWork, TrainWork, ragged, sampling_contender, training_contender

from palestra.model.random_model import SHAPES, make_random_model

TENANTS = 16
PACKAGES = ("palestra", "torch", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Callable[[Contest, str, Target], list[Row]]
    shapes: tuple[str, ...] = ("tiny",)
    """Where it runs on the CPU unless --shape says otherwise."""
    on_gpu: bool = False
    targets: dict[str, Target] = field(default_factory=dict)
    """For each shape, on the CPU."""


def sample_ragged(contest: Contest, what: str, target: Target) -> list[Row]:
    n, longest = (16, 64) if contest.quick else (64, 128) if contest.is_short else (32, 128)
    work = SampleWork.ragged(n, (16, 256), (16, longest))
    return contest.sample(what, work, target, batches=(16,) if contest.quick else (8, 16, 64))


def sample_grpo(contest: Contest, what: str, target: Target) -> list[Row]:
    work = SampleWork.uniform(1 if contest.quick else 8, 512, 64, samples=16)
    return contest.sample(what, work, target, batches=(16,) if contest.quick else (8, 16, 64, 128))


def sample_uniform(contest: Contest, what: str, target: Target) -> list[Row]:
    n, length, batches = (64, 64, (8, 16, 64)) if contest.device == "cpu" else (256, 128, (64, 256))
    work = SampleWork.uniform(n, length, length)
    return contest.sample(what, work, target, batches=(64,) if contest.quick else batches)


def sample_single(contest: Contest, what: str, target: Target) -> list[Row]:
    work = SampleWork.uniform(1, 64, 64, repeats=1 if contest.quick else 4)
    return contest.sample(what, work, target, batches=(1,))


def train_ragged(contest: Contest, what: str, target: Target) -> list[Row]:
    low, high = (32, 512) if contest.device == "cpu" else (64, 1024)
    n, high = (8, high // 2) if contest.quick else (32, high)
    work = TrainWork(ragged(n, low, high, seed=5))
    return contest.train(what, work, target, batches=(4,) if contest.quick else (2, 4, 8, 16))


def train_tenants_16(contest: Contest, what: str, target: Target) -> list[Row]:
    return [_train_tenants(contest, what, target, tokens=16)]


def train_tenants_256(contest: Contest, what: str, target: Target) -> list[Row]:
    return [_train_tenants(contest, what, target, tokens=256)]


def _train_tenants(contest: Contest, what: str, target: Target, *, tokens: int) -> Row:
    """A step: every tenant has its gradient and its optimizer step."""
    ours, work = contest.ours, TrainWork((tokens, tokens))
    adapters = ours.adapters(TENANTS // 2 if contest.quick and tokens > 16 else TENANTS)
    together, in_turn = (
        training_contender(ours.tenants(work, adapters, together=together), 1, ours.device)
        for together in (True, False)
    )
    row = contest.versus(what, "steps/s", together, ("ours, one tenant after another", in_turn), target)
    ours.free(adapters)
    return row


def sample_tenants(contest: Contest, what: str, target: Target) -> list[Row]:
    ours, work = contest.ours, SampleWork.uniform(64, 64, 32 if contest.quick else 64)
    adapters = ours.adapters(TENANTS)
    ours.tenants(TrainWork((16,)), adapters, together=True)()  # a step each: no adapter is still zero
    mixed, one = (
        sampling_contender(work, ours.vocab_size, ours.sampler(work, some), ours.device)
        for some in (adapters, adapters[:1])
    )
    row = contest.versus(what, "tok/s", mixed, ("ours, one adapter", one), target)
    ours.free(adapters)
    return [row]


CASES = (
    Case(
        "sample_ragged",
        sample_ragged,
        shapes=("tiny", "small"),
        on_gpu=True,
        targets={"tiny": Target(ratio=2.0), "small": Target(ratio=1.4)},
    ),
    Case("sample_grpo", sample_grpo, targets={"tiny": Target(ratio=6.0)}),
    Case("sample_uniform", sample_uniform, on_gpu=True, targets={"tiny": Target(value=3000)}),
    Case("sample_single", sample_single, targets={"tiny": Target(value=350)}),
    Case(
        "train_ragged",
        train_ragged,
        shapes=("tiny", "small"),
        on_gpu=True,
        targets=dict.fromkeys(("tiny", "small"), Target(ratio=1.3)),
    ),
    Case("train_tenants_16", train_tenants_16, targets={"tiny": Target(ratio=3.0)}),
    Case("train_tenants_256", train_tenants_256, targets={"tiny": Target(ratio=1.15)}),
    Case("sample_tenants", sample_tenants, targets={"tiny": Target(ratio=0.8)}),
)
NAMES = tuple(case.name for case in CASES)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser("compute", "Sampling and training speed of the compute core, beside its peers.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32 on the CPU, bfloat16 on a GPU")
    parser.add_argument(
        "--shape",
        type=some_of("shape", tuple(SHAPES)),
        metavar="NAME,…",
        help=f"run every row on these ({', '.join(SHAPES)}) instead of its own",
    )
    parser.add_argument("--rows", type=some_of("row", NAMES), metavar="NAME,…", help=f"only these ({', '.join(NAMES)})")
    return parser.parse_args(argv)


def plan(args: argparse.Namespace) -> dict[str, list[Case]]:
    """The rows to run on each shape: a model is made once."""
    on_gpu = args.device == "cuda"
    wanted = [c for c in CASES if c.name in (args.rows or NAMES) and (args.rows or not on_gpu or c.on_gpu)]
    shapes: dict[str, list[Case]] = {}
    for case in wanted:
        own = ("qwen3-0.6b", "qwen3-4b") if on_gpu else case.shapes
        for shape in args.shape or (own[:1] if args.quick else own):
            shapes.setdefault(shape, []).append(case)
    return shapes


def run(args: argparse.Namespace, progress: Progress) -> Report:
    rows: list[Row] = []
    notes: list[str] = []
    if args.peer_url:
        notes.append("--peer-url does not apply: this benchmark's peers run in this process, not behind a server")
    if args.quick:
        notes.append("--quick: smaller workloads, a short pilot, few rounds; targets are meant for the full run")
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    for shape, cases in plan(args).items():
        rounds = args.rounds or (2 if args.quick else 5 if shape == "tiny" else 3)
        with tempfile.TemporaryDirectory(prefix="palestra-bench-") as scratch:
            progress.doing(f"making the {shape} model")
            folder = make_random_model(Path(scratch) / shape, shape=shape, dtype=dtype)
            contest = Contest(shape, folder, dtype, args.device, rounds, args.quick, progress, notes)
            for case in cases:
                target = case.targets.get(shape, Target()) if args.device == "cpu" else Target()
                start = time.monotonic()
                rows += case.run(contest, f"{case.name} {shape}", target)
                contest.release()
                progress.say(f"{case.name} {shape}: {time.monotonic() - start:.0f} s")
    return Report("compute", machine(), versions(PACKAGES), rows, notes)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; run without --device, or see: palestra doctor", file=sys.stderr)
        return 2
    progress = Progress()
    try:
        result = run(args, progress)
    finally:
        progress.done()
    report(result, json_line=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
