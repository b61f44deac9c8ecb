"""A whole GRPO step through `palestra train` and a server of its own, beside the core alone and a plain loop.

    python benchmarks/grpo_step.py --quick
    python benchmarks/grpo_step.py --device cuda --shape qwen3-4b
    python benchmarks/grpo_step.py --device cuda --shape qwen3-30b-a3b --groups 32 --drawn

A random model plays an environment whose rewards are random and differ within a group, so that no group is drawn anew.
The core is asked for the same numbers of tokens without server, environment and loop; the plain loop is transformers'
`generate` and PEFT's training step, each timed on a part of the work and scaled up to all of it. With --drawn the
worker draws the weights itself, and the whole step is measured alone: sampled tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from harness import Measure, Progress, Report, Row, argument_parser, figure, machine, positive, report, versions
from peers.drawn_engine import drawn_engine
from peers.ours import Ours
from peers.workloads import SampleWork, TrainWork, timed

from palestra.config.train import RunConfig, load_train_config
from palestra.endpoints.own_server import own_server
from palestra.model import load_model
from palestra.runs.listener import Silence
from palestra.runs.writer import RunFolder
from palestra.testing.random_config import PUBLISHED, SHAPES
from palestra.testing.random_model import make_random_model
from palestra.training.launch import train

INSIDE = 0.8
FASTER = 4.0
PEER_PART = 4  # the plain loop does a quarter of the groups
GOALS = {"qwen3-30b-a3b": 2_500}
"""Sampled tokens a second, end to end."""


@dataclass(frozen=True, slots=True)
class Size:
    groups: int
    samples: int
    tokens: int
    steps: int


def main() -> None:
    args = parse()
    size = Size(4, 4, 16, 3) if args.quick else Size(args.groups, args.samples, args.tokens, args.steps)
    family, overrides = PUBLISHED.get(args.shape, ("qwen3", {}))
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    progress = Progress()
    with tempfile.TemporaryDirectory() as scratch:
        progress.doing(f"making the {args.shape} model")
        folder = make_random_model(
            Path(scratch) / args.shape,
            family=family,
            shape=args.shape,
            dtype=dtype,
            overrides=overrides,
            has_weights=not args.drawn,
        )
        if args.drawn:
            os.environ |= drawn_engine(Path(scratch) / "engine")
        steps = asyncio.run(run_steps(Path(scratch), folder, args, size, progress))
        prompt = round(statistics.mean(s["prompt"] for s in steps))
        for step in steps:
            progress.say(f"a step: {', '.join(f'{name} {figure(value)}' for name, value in step.items())}")
        if args.drawn:
            rows = [row_of_step(args.shape, steps)]
        else:
            bench = Bench(folder, dtype, args.device, size, prompt, progress)
            rows = [*rows_of_core(bench, steps), row_of_loop(bench, steps)]
    progress.done()
    work = f"{size.groups} groups of {size.samples}, {size.tokens} new tokens, prompts of {prompt}"
    notes = [f"{args.shape}: {work}; {size.steps} steps, the first dropped"]
    if not args.drawn:
        notes.append("the plain loop: transformers and PEFT on a part of the work, scaled up")
    packages = ("palestra", "torch", "transformers", "peft")
    report(Report("grpo_step", machine(), versions(packages), rows, notes), json_line=args.json)


def parse() -> argparse.Namespace:
    parser = argument_parser("grpo_step", "A GRPO step through a server, beside its parts alone.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="tiny on the CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--steps", type=positive, default=4, metavar="N")
    parser.add_argument("--groups", type=positive, default=64, metavar="N", help="prompts a step")
    parser.add_argument("--samples", type=positive, default=8, metavar="N", help="answers to a prompt")
    parser.add_argument("--tokens", type=positive, default=512, metavar="N", help="of an answer")
    parser.add_argument("--drawn", action="store_true", help="the worker draws the weights; without peers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    args = parser.parse_args()
    args.shape = args.shape or ("tiny" if args.device == "cpu" else "qwen3-0.6b")
    return args


async def run_steps(
    scratch: Path, folder: Path, args: argparse.Namespace, size: Size, progress: Progress
) -> list[dict[str, float]]:
    """Seconds and tokens of each step but the first."""
    sys.path.insert(0, str(Path(__file__).parent))
    async with own_server(
        *(str(folder), "random", scratch / "state", scratch / "log", progress.doing),
        device=args.device,
        settings=args.set,
    ) as url:
        settings = [
            *("kind=grpo", f"steps={size.steps}", "eval.every=0", "checkpoint.every=1000000", f"server={url}"),
            "rollout.endings.length=grade",
            *("model.name=random", "model.rank=32", f"model.tokenizer={folder}", f"runs={scratch / 'runs'}"),
            f"rollout={{group_size: {size.samples}, groups_per_step: {size.groups}, max_tokens: {size.tokens}}}",
            'environments=[{name: "peers.random_reward:RandomReward"}]',
        ]
        config: RunConfig = load_train_config([], settings)
        with RunFolder.create(config.runs, "grpo", config) as run:
            await train(config, run, Silence())
            metrics = run.read_metrics()[1:]
    return [
        {
            "total": m["time/total_s"],
            "collect": m["time/collect_s"],
            "update": m["time/update_s"],
            "sampled": m["length/mean"] * m["rollouts/total"],
            "trained": m["batch/tokens"],
            "prompt": m["length/prompt_mean"],
        }
        for m in metrics
    ]


def row_of_step(shape: str, steps: list[dict[str, float]]) -> Row:
    rates = Measure(tuple(step["sampled"] / step["total"] for step in steps))
    return Row("a step, end to end", "tok/s", rates, target_value=GOALS.get(shape))


def rows_of_core(bench: Bench, steps: list[dict[str, float]]) -> list[Row]:
    rates = {"sampled": ("collect", bench.core_sampling()), "trained": ("update", bench.core_training())}
    return [
        Row(
            f"{what} inside a step",
            "tok/s",
            Measure(tuple(s[what] / s[stage] for s in steps)),
            "the core alone",
            Measure((alone,)),
            target_ratio=INSIDE,
        )
        for what, (stage, alone) in rates.items()
    ]


@dataclass(frozen=True, slots=True)
class Bench:
    """The pieces of a step, each alone: what it made is free again when a figure is there."""

    folder: Path
    dtype: str
    device: str
    size: Size
    prompt: int
    progress: Progress

    def say(self, what: str, value: float, unit: str) -> float:
        self.progress.say(f"{what}: {figure(value)} {unit}")
        return value

    @property
    def sequences(self) -> int:
        return self.size.groups * self.size.samples

    def core_sampling(self) -> float:
        """Tokens per second."""
        ours = Ours(load_model(self.folder, dtype=self.dtype, device=self.device))
        work = self._sampling(self.size.groups)
        generate, runs = ours.sampler(work, ours.adapters(1)), count()
        seconds = [timed(lambda: generate(work.prompts(1000, next(runs))), ours.device) for _ in range(3)]
        return self.say("sampling, the core alone", work.tokens / min(seconds[1:]), "tok/s")

    def core_training(self) -> float:
        ours = Ours(load_model(self.folder, dtype=self.dtype, device=self.device))
        work = self._training(self.sequences)
        step = ours.stepper(work, *ours.adapters(1))
        rate = work.tokens / min([timed(step, ours.device) for _ in range(3)][1:])
        return self.say("training, the core alone", rate, "tok/s")

    def loop_sampling(self) -> float:
        """Seconds of a step of the plain loop."""
        from peers.hugging_face import GenerateSetup, generate_with, load

        model = load(self.folder, attention="sdpa", dtype=self.dtype, device=self.device)
        part = max(1, self.size.groups // PEER_PART)
        work, setup = self._sampling(part), GenerateSetup("sdpa", part * self.size.samples)
        short = SampleWork.uniform(part, self.prompt, 2, samples=self.size.samples)
        generate_with(model, short, setup)(short.prompts(1000, 9))
        generate = generate_with(model, work, setup)
        seconds = timed(lambda: generate(work.prompts(1000, 0)), model.device) * self.size.groups / part
        return self.say("sampling, the plain loop", seconds, "s")

    def loop_training(self) -> float:
        from peers.peft_training import PeftSetup, PeftTrainer

        peft = PeftTrainer(self.folder, dtype=self.dtype, device=self.device)
        work = self._training(max(8, self.sequences // PEER_PART**2))
        step = peft.stepper(work, PeftSetup(8, masked=False))
        step()
        return self.say("training, the plain loop", timed(step, peft.device) * self.sequences / len(work.lengths), "s")

    def _sampling(self, groups: int) -> SampleWork:
        return SampleWork.uniform(groups, self.prompt, self.size.tokens, samples=self.size.samples)

    def _training(self, sequences: int) -> TrainWork:
        return TrainWork((self.prompt + self.size.tokens,) * sequences)


def row_of_loop(bench: Bench, steps: list[dict[str, float]]) -> Row:
    loop = bench.loop_sampling() + bench.loop_training()
    ours = Measure(tuple(s["total"] for s in steps))
    return Row("a step", "s", ours, "plain loop", Measure((loop,)), target_ratio=FASTER, less_is_better=True)


if __name__ == "__main__":
    main()
