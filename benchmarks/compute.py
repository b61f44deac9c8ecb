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
from harness import Progress, Report, Row, argument_parser, figure, machine, report, some_of, versions
from peers.contest import Contest, Target
from peers.decode import Ceilings, DecodeWork, decode_contender, prefill_contender
from peers.workloads import SampleWork, TrainWork, ragged, sampling_contender, training_contender

from palestra.model import Adapter
from palestra.model.numerics import Numerics, set_numerics
from palestra.testing.drawn_model import draw_published
from palestra.testing.random_config import PUBLISHED, SHAPES
from palestra.testing.random_model import make_random_model

TENANTS = 16
GPU_SHAPES = ("qwen3-0.6b", "qwen3-4b")
PACKAGES = ("palestra", "torch", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Callable[[Contest, str, Target], list[Row]]
    shapes: tuple[str, ...] = ("tiny",)
    """Where it runs on the CPU unless --shape says otherwise."""
    gpu_shapes: tuple[str, ...] = ()
    """The same on a GPU; none: it does not run there."""
    on_cpu: bool = True
    family: str = "qwen3"
    targets: dict[str, Target] = field(default_factory=dict)
    """For each shape; the published sizes run on a GPU."""


def sample_ragged(contest: Contest, what: str, target: Target) -> list[Row]:
    n, longest = (16, 64) if contest.quick else (64, 128) if contest.is_short else (32, 128)
    work = SampleWork.ragged(n, (16, 256), (16, longest))
    return contest.sample(what, work, target, batches=(16,) if contest.quick else (8, 16, 64))


def sample_grpo(contest: Contest, what: str, target: Target) -> list[Row]:
    if contest.device == "cuda":
        work = SampleWork.uniform(8 if contest.quick else 32, 1024, 64 if contest.quick else 256, samples=16)
        return contest.sample(what, work, target, batches=(128,) if contest.quick else (64, 128, 256))
    work = SampleWork.uniform(1 if contest.quick else 8, 512, 64, samples=16)
    return contest.sample(what, work, target, batches=(16,) if contest.quick else (8, 16, 64, 128))


def sample_uniform(contest: Contest, what: str, target: Target) -> list[Row]:
    n, length, batches = (64, 64, (8, 16, 64)) if contest.device == "cpu" else (256, 128, (64, 256))
    work = SampleWork.uniform(n, length, length)
    return contest.sample(what, work, target, batches=batches[-1:] if contest.quick else batches)


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


def decode(contest: Contest, what: str, target: Target) -> list[Row]:
    """Full batches of prompts that are computed already: one adapter, sixteen of mixed ranks, none; fewer rows."""
    ours, steps = contest.ours, 32 if contest.quick else 128
    one = ours.adapters(1, unembed=False)
    mixed = ours.adapters(TENANTS, (8, 16, 32, 64), unembed=False)
    ours.tenants(TrainWork((16,)), [*one, *mixed], together=True)()  # a step each: no adapter is still zero
    full = DecodeWork(256, steps=steps)
    single = ("ours, one adapter", decode_contender(ours, full, one))
    rows = [
        contest.alone(f"{what}, 256 rows, one adapter", "tok/s", decode_contender(ours, full, one), target),
        contest.versus(
            f"{what}, 256 rows, {TENANTS} adapters of rank 8–64",
            "tok/s",
            decode_contender(ours, full, mixed),
            single,
            Target(ratio=0.85),
        ),
    ]
    for n, adapters, goal in ((256, [], 34_000), (64, one, 9_500), (1, one, 190)):
        name = f"{what}, {n} row{'s' if n > 1 else ''}, {'one adapter' if adapters else 'no adapter'}"
        goals = Target(value=goal) if target.value else Target()
        rows.append(contest.alone(name, "tok/s", decode_contender(ours, DecodeWork(n, steps=steps), adapters), goals))
    ours.free([*one, *mixed])
    return rows


def hybrid(contest: Contest, what: str, target: Target) -> list[Row]:
    """Models with recurrent states: decoding, one sampler after another (the states of 256 sequences of Qwen3.5-9B are
    13 GB), a long prompt, and training of short and of long sequences."""
    ours, steps, goals = contest.ours, 32 if contest.quick else 128, HYBRID_GOALS.get(contest.shape, {})
    limits, one, rows = Ceilings.measured(ours.device), ours.snapshots(1), []

    def add(name: str, contender: Callable[[], float]) -> None:
        rows.append(contest.alone(f"{what}, {name}", "tok/s", contender, Target(value=goals.get(name))))
        contest.progress.say(f"{rows[-1].what}: {figure(rows[-1].ours.median)} tok/s")

    for n in (256, 1):
        name, work = f"{n} row{'s' if n > 1 else ''}, one adapter", DecodeWork(n, steps=steps)
        add(name, decode_contender(ours, work, one))
        share = rows[-1].ours.median / limits.tokens_per_s(ours.model.spec, work)
        contest.note(f"{what}, {name}: {share:.0%} of the roofline")
        contest.release()
    add("a prompt of 32,768", prefill_contender(ours, 32768, one[0]))
    ours.free(one)
    contest.release()
    one = ours.adapters(1, unembed=False)
    for lengths in ((512,) * 16, (32768,)):
        work = TrainWork(lengths)
        step = training_contender(ours.stepper(work, *one, checkpointing=True), work.tokens, ours.device)
        add(f"training {len(lengths)} x {lengths[0]:,}", step)
        contest.release()
    ours.free(one)
    return rows


def experts(contest: Contest, what: str, target: Target) -> list[Row]:
    """Decoding with and without adapters, one sampler after another, and training; the goals are the shape's own."""
    ours, steps, goals = contest.ours, 16 if contest.quick else 64, EXPERT_GOALS[contest.shape]
    limits = Ceilings.measured(ours.device)
    one, rows = ours.snapshots(1), []

    def decode_row(name: str, work: DecodeWork, adapters: list[Adapter]) -> Callable[[], float]:
        contender = decode_contender(ours, work, adapters)
        row = contest.alone(f"{what}, {name}", "tok/s", contender, Target(value=goals.get(name)))
        share = row.ours.median / limits.tokens_per_s(ours.model.spec, work)
        contest.note(f"{what}, {name}: {share:.0%} of the roofline")
        rows.append(row)
        contest.progress.say(f"{row.what}: {figure(row.ours.median)} tok/s, {share:.0%} of the roofline")
        return contender

    for n in (256, 64, 1):
        for adapters in (one, []):
            name = f"{n} row{'s' if n > 1 else ''}, {'one adapter' if adapters else 'no adapter'}"
            decode_row(name, DecodeWork(n, steps=steps), adapters)
            contest.release()
    mixed = ours.snapshots(TENANTS, (8, 16, 32, 64))
    name, work = f"{what}, 256 rows, {TENANTS} adapters of rank 8–64", DecodeWork(256, steps=steps)
    try:
        many, single = (decode_contender(ours, work, some) for some in (mixed, one))
        rows.append(contest.versus(name, "tok/s", many, ("ours, one adapter", single), Target(ratio=0.8)))
    except (RuntimeError, torch.OutOfMemoryError) as e:  # beside large adapters there may be no room for all states
        contest.note(f"{name}: not measured, {e}")
    ours.free([*mixed, *one])
    contest.release()
    one, work = ours.adapters(1, unembed=False), TrainWork((512,) * 16)
    step = training_contender(ours.stepper(work, *one, checkpointing=True), work.tokens, ours.device)
    goal = Target(value=goals.get("training"))
    rows.append(contest.alone(f"{what}, training, checkpointing", "tok/s", step, goal))
    ours.free(one)
    return rows


def decode_roofline(contest: Contest, what: str, target: Target) -> list[Row]:
    """The share of what the card's measured bandwidth and products allow; on 4B with long contexts (512 rows of 2,048
    tokens would be 155 GB of keys and values)."""
    work = DecodeWork(256, 2048, 32) if contest.shape == "qwen3-4b" else DecodeWork(256)
    limit = Ceilings.measured(contest.ours.device).tokens_per_s(contest.ours.model.spec, work)
    rate = decode_contender(contest.ours, work, [])
    name = f"{what}, {work.rows} rows at {work.context:,.0f} tokens"
    return [contest.alone(name, "% of the roofline", lambda: 100 * rate() / limit, target)]


def numerics(contest: Contest, what: str, target: Target) -> list[Row]:
    """`exact` against `fast`; graphs remember the products that they were recorded with."""
    ours, adapters = contest.ours, contest.ours.adapters(1, unembed=False)
    work, is_large = TrainWork(ragged(16, 64, 960, seed=5)), contest.shape in EXPERT_GOALS

    def under(name: Numerics, contender: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            set_numerics(name)
            try:
                return contender()
            finally:
                set_numerics("exact")

        return run

    def train() -> Callable[[], float]:
        step = ours.stepper(work, *adapters, checkpointing=is_large)
        return training_contender(step, work.tokens, ours.device)

    rows = []
    for kind, make in (
        ("decode, 256 rows", lambda: decode_contender(ours, DecodeWork(256), adapters)),
        ("training", train),
    ):
        exact, fast = (under(name, make()) for name in ("exact", "fast"))
        rows.append(contest.versus(f"{what}, {kind}", "tok/s", exact, ("ours, fast", fast), target))
        contest.release()
    ours.free(adapters)
    return rows


def train_packed(contest: Contest, what: str, target: Target) -> list[Row]:
    """About 8,192 tokens in one micro-batch: plain, with activations recomputed, and shared by sixteen tenants."""
    ours, work = contest.ours, TrainWork(ragged(16, 64, 960, seed=5))
    adapters = ours.adapters(TENANTS)
    plain, tenants, recomputed = (
        training_contender(step, work.tokens, ours.device)
        for step in (
            ours.stepper(work, adapters[0]),
            ours.stepper(work, *adapters),
            ours.stepper(work, adapters[0], checkpointing=True),
        )
    )
    figures = (target.value, 18_500, 41_000, 14_000) if target.value else (None,) * 4
    goals = [Target(value=figure) for figure in figures]
    rows = [
        contest.alone(what, "tok/s", plain, goals[0]),
        contest.alone(f"{what}, checkpointing", "tok/s", recomputed, goals[1]),
        contest.versus(f"{what}, {TENANTS} tenants", "tok/s", tenants, ("ours, one tenant", plain), Target(ratio=0.9)),
    ]
    ours.free(adapters)
    contest.release()
    rows += [
        contest.memory_alone(f"{what}, peak memory", work, goals[2]),
        contest.memory_alone(f"{what}, checkpointing, peak memory", work, goals[3], checkpointing=True),
    ]
    return rows


EXPERT_GOALS = {
    "qwen3-30b-a3b": {
        "256 rows, one adapter": 9_000,
        "64 rows, one adapter": 2_600,
        "1 row, one adapter": 130,
        "256 rows, no adapter": 11_500,
        "64 rows, no adapter": 3_400,
        "1 row, no adapter": 180,
        "training": 20_000,
    },
    "gpt-oss-20b": {"256 rows, one adapter": 10_000, "1 row, one adapter": 150},
    "qwen3.5-35b-a3b": {"256 rows, one adapter": 6_000, "1 row, one adapter": 120},
}
HYBRID_GOALS = {
    "qwen3.5-9b": {"256 rows, one adapter": 15_000, "1 row, one adapter": 150, "training 16 x 512": 9_500},
}
HYBRIDS = ("qwen3.5-9b", "nemotron-3-nano", "gemma4-12b", "gemma4-26b-a4b")
CASES = (
    Case(
        "sample_ragged",
        sample_ragged,
        shapes=("tiny", "small"),
        gpu_shapes=GPU_SHAPES,
        targets={"tiny": Target(ratio=2.0), "small": Target(ratio=1.4)},
    ),
    Case(
        "sample_grpo",
        sample_grpo,
        gpu_shapes=("qwen3-4b",),
        targets={"tiny": Target(ratio=6.0), "qwen3-4b": Target(ratio=8.0)},
    ),
    Case(
        "sample_uniform",
        sample_uniform,
        gpu_shapes=GPU_SHAPES,
        targets={"tiny": Target(value=3000), "qwen3-4b": Target(ratio=4.0), "qwen3-0.6b": Target(ratio=4.0)},
    ),
    Case("sample_single", sample_single, targets={"tiny": Target(value=350)}),
    Case(
        "train_ragged",
        train_ragged,
        shapes=("tiny", "small"),
        gpu_shapes=GPU_SHAPES,
        targets={"tiny": Target(ratio=1.3), "small": Target(ratio=1.3), "qwen3-4b": Target(ratio=2.0)},
    ),
    Case(
        "moe_sample",
        sample_ragged,
        shapes=("tiny", "small"),
        family="qwen3_moe",
        targets={"tiny": Target(ratio=2.0), "small": Target(ratio=2.0)},
    ),
    Case(
        "moe_train",
        train_ragged,
        shapes=("tiny", "small"),
        family="qwen3_moe",
        targets={"tiny": Target(ratio=2.0), "small": Target(ratio=2.0)},
    ),
    Case("train_tenants_16", train_tenants_16, targets={"tiny": Target(ratio=3.0)}),
    Case("train_tenants_256", train_tenants_256, targets={"tiny": Target(ratio=1.15)}),
    Case("sample_tenants", sample_tenants, targets={"tiny": Target(ratio=0.8)}),
    Case("decode", decode, gpu_shapes=("qwen3-4b",), on_cpu=False, targets={"qwen3-4b": Target(value=27_000)}),
    Case("experts", experts, gpu_shapes=tuple(EXPERT_GOALS), on_cpu=False),
    Case("hybrid", hybrid, gpu_shapes=HYBRIDS, on_cpu=False),
    Case(
        "decode_roofline",
        decode_roofline,
        gpu_shapes=("qwen3-4b", "qwen3-8b"),
        on_cpu=False,
        targets={"qwen3-4b": Target(value=50), "qwen3-8b": Target(value=50)},
    ),
    Case(
        "train_packed", train_packed, gpu_shapes=("qwen3-4b",), on_cpu=False, targets={"qwen3-4b": Target(value=26_000)}
    ),
    Case("numerics", numerics, gpu_shapes=("qwen3-4b",), on_cpu=False, targets={"qwen3-4b": Target(ratio=0.95)}),
)
NAMES = tuple(case.name for case in CASES)
ALONE = ("experts", "hybrid", "numerics")
"""Rows without another's model beside ours: weights are drawn on the card."""


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


def plan(args: argparse.Namespace) -> dict[tuple[str, str], list[Case]]:
    """The rows to run on each family and shape: a model is made once."""
    on_gpu = args.device == "cuda"
    usual = [c.name for c in CASES if (c.gpu_shapes if on_gpu else c.on_cpu)]
    wanted = [c for c in CASES if c.name in (args.rows or usual)]
    models: dict[tuple[str, str], list[Case]] = {}
    for case in wanted:
        own = (case.gpu_shapes or GPU_SHAPES) if on_gpu else case.shapes
        for shape in args.shape or (own[:1] if args.quick else own):
            family, _ = PUBLISHED.get(shape, (case.family, {}))
            models.setdefault((family, shape), []).append(case)
    return models


def run(args: argparse.Namespace, progress: Progress) -> Report:
    rows: list[Row] = []
    notes: list[str] = []
    if args.peer_url:
        notes.append("--peer-url does not apply: this benchmark's peers run in this process, not behind a server")
    if args.quick:
        notes.append("--quick: smaller workloads, a short pilot, few rounds; targets are meant for the full run")
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    for (family, shape), cases in plan(args).items():
        rounds = args.rounds or (2 if args.quick else 5 if shape == "tiny" else 3)
        with tempfile.TemporaryDirectory(prefix="palestra-bench-") as scratch:
            progress.doing(f"making the {shape} model of {family}")
            if all(case.name in ALONE for case in cases):
                folder, model = Path(scratch), draw_published(shape, dtype, args.device)
            else:
                folder = make_random_model(Path(scratch) / shape, family=family, shape=shape, dtype=dtype)
                model = None
            contest = Contest(shape, folder, dtype, args.device, rounds, args.quick, progress, notes, model)
            for case in cases:
                target = case.targets.get(shape, Target())
                start = time.monotonic()
                found = case.run(contest, f"{case.name} {shape}", target)
                contest.release()
                progress.say(f"{case.name} {shape}: {time.monotonic() - start:.0f} s")
                for row in found:
                    progress.say(f"  {row.what}: {figure(row.ours.median)} {row.unit}{_beside(row)}")
                rows += found
    return Report("compute", machine(), versions(PACKAGES), rows, notes)


def _beside(row: Row) -> str:
    return "" if row.ratio is None else f", {row.ratio:.2f}x of {row.peer}"


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
