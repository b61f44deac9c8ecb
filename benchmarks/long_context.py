"""Long sequences: what they take to be trained, and what a long prompt does to those that decode beside it.

    python benchmarks/long_context.py --quick
    python benchmarks/long_context.py --device cuda --rows train --shape qwen3-4b
    python benchmarks/long_context.py --device cuda --rows offload,small,prompt

`train`: one sequence of 131,072 tokens, whose model FLOPs a second are compared with those of 8,192 tokens in the same
process. `offload`: kept activations in the host's memory against checkpointing alone. `small`: 32,768 tokens of an 8B
model in nf4, the process held to 24 GB. `prompt`: a prompt of 30,000 tokens beside 64 rows that decode. Weights are
drawn where they are needed. FLOPs are those of the products of forward and backward pass and of causal attention;
what is computed again is not counted.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from harness import (
    Measure,
    Progress,
    Report,
    Row,
    alternate,
    argument_parser,
    figure,
    machine,
    report,
    some_of,
    versions,
)
from peers.decode import Ceilings
from peers.device_memory import DeviceMemory
from peers.ours import Ours
from peers.workloads import TrainWork, training_contender

from palestra.memory_plan.model_plan import PlanRequest, plan_memory
from palestra.model import Adapter, ModelSpec, Sampler, Trainer
from palestra.model.loading.parameter_counts import count_parameters
from palestra.model.quantised.forms import FORMS
from palestra.testing.drawn_model import RandomWeights, draw_model
from palestra.testing.random_config import PUBLISHED, SHAPES, random_config
from palestra.types import Checkpointing, SampleRequest, SamplingParams

GB = 10**9
SETUPS = ("train", "offload", "small", "prompt")


@dataclass(frozen=True, slots=True)
class Size:
    shapes: tuple[str, ...]
    long: int
    short: int
    memory_bytes: int
    """Below which the long one has to be trained."""
    offload: int
    small_shape: str
    small: int
    small_bytes: int
    prompt: int
    rows: int
    steps: int


ON_GPU = Size(("qwen3-4b", "qwen3-8b"), 131_072, 8_192, 120 * GB, 32_768, "qwen3-8b", 32_768, 24 * GB, 30_000, 64, 200)
ON_CPU = Size(("micro",), 1_024, 128, 8 * GB, 512, "micro", 256, 8 * GB, 512, 4, 20)


class Bench:
    def __init__(self, args: argparse.Namespace, size: Size, progress: Progress):
        self.size, self.device, self.progress = size, torch.device(args.device), progress
        self.shapes = tuple(args.shape or size.shapes)
        self.dtype = "bfloat16" if args.device == "cuda" else "float32"
        self.notes: list[str] = []

    def model(self, shape: str, form: str | None = None) -> Ours:
        self.release()
        family, overrides = PUBLISHED.get(shape, ("qwen3", {}))
        wide = replace(SHAPES[shape], max_positions=2 * self.size.long)
        self.progress.doing(f"drawing {shape}")
        return Ours(draw_model(family, wide, self.dtype, str(self.device), overrides, FORMS[form] if form else None))

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def say(self, text: str) -> None:
        self.notes.append(text)
        self.progress.say(text)

    def step(self, ours: Ours, adapter: Adapter, length: int, checkpointing: Checkpointing) -> Callable[[], float]:
        """Tokens a second of a step on one sequence."""
        ours.checkpointing = Trainer(ours.model.decoder, ours.pool, checkpointing=checkpointing)
        run = ours.stepper(TrainWork((length,)), adapter, checkpointing=True)
        return training_contender(run, length, self.device)

    # Rows

    def train(self) -> Iterator[Row]:
        size = self.size
        for shape in self.shapes:
            ours = self.model(shape)
            spec = ours.model.spec
            (adapter,) = ours.adapters(1)
            checkpointing = self.cheapest(shape, spec)
            short = self.step(ours, adapter, size.short, True)
            short()  # kernels are compiled
            short_flops = statistics.median(short() for _ in range(3)) * flops_per_token(spec, size.short)
            memory = DeviceMemory(self.device)
            rate = self.step(ours, adapter, size.long, checkpointing)()
            long_flops = rate * flops_per_token(spec, size.long)
            peak = memory.peak_bytes()
            self.say(
                f"{shape}: {size.long:,} tokens in {size.long / rate:.0f} s, checkpointing {checkpointing}: "
                f"{figure(rate)} tok/s, {long_flops / 1e12:.0f} TFLOP/s; {size.short:,} tokens: "
                f"{short_flops / flops_per_token(spec, size.short):.0f} tok/s, {short_flops / 1e12:.0f} TFLOP/s"
            )
            name = f"{shape}: a sequence of {size.long:,} tokens"
            goal = size.memory_bytes / GB
            yield Row(f"{name}, peak memory", "GB", Measure((peak / GB,)), target_value=goal, less_is_better=True)
            yield Row(
                *(f"{name}, FLOPs a second", "TFLOP/s", Measure((long_flops / 1e12,))),
                *(f"{size.short:,} tokens", Measure((short_flops / 1e12,))),
                target_ratio=0.8,
            )
            ours.free([adapter])

    def cheapest(self, shape: str, spec: ModelSpec) -> Checkpointing:
        family, overrides = PUBLISHED.get(shape, ("qwen3", {}))
        config = random_config(family, SHAPES[shape], overrides=overrides) | {"dtype": self.dtype}
        request = PlanRequest(self.size.memory_bytes, 1, self.size.long)
        plan = plan_memory(RandomWeights(config, torch.device("meta")), spec, request)
        self.say(f"{shape}: planned {(plan.total_bytes - plan.kv_bytes) / GB:.1f} GB without a KV cache")
        return "offload" if plan.offloaded_bytes else True

    def offload(self) -> Iterator[Row]:
        ours = self.model(self.shapes[0])
        (adapter,) = ours.adapters(1)
        for length in (self.size.short, self.size.offload):
            contenders = {
                "offload": self.step(ours, adapter, length, "offload"),
                "checkpointing": self.step(ours, adapter, length, True),
            }
            for run in contenders.values():
                run()
            measured = alternate(contenders, rounds=3)
            yield Row(
                *(f"{self.shapes[0]}: {length:,} tokens, offloaded", "tok/s", measured["offload"]),
                *("checkpointing", measured["checkpointing"]),
                target_ratio=0.85,
            )
        ours.free([adapter])

    def small(self) -> Iterator[Row]:
        size = self.size
        memory = DeviceMemory(self.device, size.small_bytes)
        ours = self.model(size.small_shape, "nf4")
        (adapter,) = ours.adapters(1)
        rate = self.step(ours, adapter, size.small, "offload")
        rate()
        what = f"{size.small_shape} in nf4: a sequence of {size.small:,} tokens"
        yield Row(f"{what}, offloaded", "tok/s", Measure((rate(),)))
        goal = size.small_bytes / GB
        peak = memory.peak_bytes() / GB
        yield Row(f"{what}, peak memory", "GB", Measure((peak,)), target_value=goal, less_is_better=True)
        ours.free([adapter])
        memory.lift()

    def prompt(self) -> Iterator[Row]:
        size, shape = self.size, self.shapes[0]
        ours = self.model(shape)
        (adapter,) = ours.snapshots(1)
        room = size.rows * (128 + 4 * size.steps) + 3 * size.prompt
        budget = 8192 if self.device.type == "cuda" else 256
        sampler = Sampler(
            ours.model.decoder, ours.pool, cache_tokens=room, max_rows=size.rows + 1, prefill_tokens=budget
        )
        rng = np.random.default_rng(7)

        def submit(prompt: tuple[int, ...], tokens: int) -> int:
            params = SamplingParams(max_tokens=tokens, stop_token_ids=(), seed=len(prompt))
            return sampler.submit(SampleRequest(prompt=prompt, params=params), adapter)

        def drawn(n: int) -> tuple[int, ...]:
            return tuple(rng.integers(0, ours.vocab_size, n).tolist())

        def first_token(prompt: tuple[int, ...]) -> tuple[float, list[float]]:
            """Seconds until it, and those of each step meanwhile."""
            number, begin, gaps = submit(prompt, 1), time.perf_counter(), list[float]()
            while True:
                start = time.perf_counter()
                tokens = sampler.step().tokens
                gaps.append(time.perf_counter() - start)
                if any(token.request_id == number for token in tokens):
                    return time.perf_counter() - begin, gaps

        found: dict[str, list[float]] = {"first": [], "shared": []}
        calm, busy = list[float](), list[float]()
        for turn in range(3):  # the first one warms up
            for _ in range(size.rows if turn == 0 else 0):
                submit(drawn(128), 4 * size.steps)
            for _ in range(size.steps // 4):
                start = time.perf_counter()
                sampler.step()
                calm.append(time.perf_counter() - start)
            prompt = drawn(size.prompt)
            seconds, gaps = first_token(prompt)
            again, _ = first_token((*prompt[:-64], *drawn(64)))
            if turn == 0:
                calm.clear()
                continue
            found["first"].append(seconds)
            found["shared"].append(again)
            busy += gaps
        for name, goal in (("first", 2.5), ("shared", 0.2)):
            what = {"first": "the first time", "shared": "all but 64 tokens shared"}[name]
            yield Row(
                *(f"{shape}: first token of a prompt of {size.prompt:,}, {what}", "s", Measure(tuple(found[name]))),
                target_value=goal,
                less_is_better=True,
            )
        yield Row(
            *(f"{shape}: p99 between tokens of {size.rows} rows beside it", "ms", Measure((1000 * p99(busy),))),
            *("without it", Measure((1000 * p99(calm),))),
            target_ratio=0.5,
            less_is_better=True,
        )


def p99(values: list[float]) -> float:
    return float(np.quantile(values, 0.99))


def flops_per_token(spec: ModelSpec, length: int) -> float:
    """Of forward and backward pass through frozen products (2 + 2 for each of their weights) and causal attention
    (2 products forward, 5 backward)."""
    weights = count_parameters(spec) - (0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size)
    return 4 * weights + 7 * length * spec.q_size * len(spec.attention_layers)


def main() -> int:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; run without --device, or see: palestra doctor", file=sys.stderr)
        return 2
    progress = Progress()
    bench = Bench(args, ON_GPU if args.device == "cuda" else ON_CPU, progress)
    rows: list[Row] = []
    for setup in args.rows:
        for row in getattr(bench, setup)():
            progress.say(f"{row.what}: {figure(row.ours.median)} {row.unit}")
            rows.append(row)
    if args.device == "cuda":
        limits = Ceilings.measured(bench.device)
        bench.say(f"this card: {limits.flops_per_s / 1e12:.0f} TFLOP/s, {limits.bytes_per_s / 1e12:.1f} TB/s")
    progress.done()
    report(Report("long_context", machine(), versions(("palestra", "torch")), rows, bench.notes), json_line=args.json)
    return 0


def parse() -> argparse.Namespace:
    parser = argument_parser("long_context", "What long sequences take.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=some_of("row", SETUPS), default=list(SETUPS), help=", ".join(SETUPS))
    parser.add_argument("--shape", type=some_of("shape", tuple(SHAPES)), help="instead of each row's own")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
