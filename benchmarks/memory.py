"""How much memory it takes to train and to sample large models with quantised weights, beside what was planned.

    python benchmarks/memory.py --quick
    python benchmarks/memory.py --device cuda

Weights are random and drawn where they are needed, one at a time: no file is read or written. On a GPU all of it runs
under a limit of the promised memory, and a run that needs more fails.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
from harness import Measure, Progress, Report, Row, argument_parser, machine, report, some_of, versions
from peers.device_memory import DeviceMemory
from peers.ours import item_of
from peers.workloads import TrainWork, timed

from palestra.memory_plan.model_plan import MemoryPlan, PlanRequest, plan_memory
from palestra.model import AdapterPool, Decoder, ModelSpec, Sampler, Trainer
from palestra.model.attention.kv_cache import KVCache
from palestra.model.loading.parameter_counts import count_parameters
from palestra.model.loading.weights import lay_out
from palestra.model.numerics import set_numerics
from palestra.model.quantised.forms import FORMS
from palestra.testing.drawn_model import RandomWeights
from palestra.testing.random_model import SHAPES, random_config
from palestra.types import AdamParams, LoraConfig, SampleRequest, SamplingParams

GB = 10**9
RANK = 32
ANSWER = 64


@dataclass(frozen=True, slots=True)
class Case:
    family: str
    shape: str
    weights: str
    memory_bytes: int
    rows: int
    context: int

    @property
    def request(self) -> PlanRequest:
        return PlanRequest(self.memory_bytes, self.rows, self.context, self.weights, RANK)


ON_GPU = (
    Case("qwen3", "qwen3-8b", "nf4", 16 * GB, 8, 4096),
    Case("qwen3_moe", "qwen3-30b-a3b", "nf4", 40 * GB, 8, 4096),
)
ON_CPU = (Case("qwen3", "micro", "nf4", GB, 2, 256), Case("qwen3_moe", "micro", "nf4", GB, 2, 256))


KV_TOKENS = 1024
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-8B": random_config("qwen3", SHAPES["qwen3-8b"]),
    "GLM-4.5-Air": {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 128},
    "GLM-4.7-Flash": {"architectures": ["Glm4MoeLiteForCausalLM"]},
    "DeepSeek-V3": {"architectures": ["DeepseekV3ForCausalLM"]},
}
"""Defaults of these classes are the published sizes."""


def run(case: Case, device: torch.device, progress: Progress) -> list[Row]:
    what = f"{case.shape} {case.weights}"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = random_config(case.family, SHAPES[case.shape]) | {"dtype": str(dtype).removeprefix("torch.")}
    spec = ModelSpec.from_config(config)
    files = RandomWeights(config, device)
    plan = plan_memory(files, spec, case.request)
    memory = DeviceMemory(device, case.memory_bytes)
    progress.say(f"{what}: drawing and quantising {count_parameters(spec) / 1e9:.1f} billion weights")
    decoder = Decoder(spec, lay_out(files, spec, dtype, device, FORMS[case.weights]))
    loaded = memory.peak_bytes()
    pool = AdapterPool(spec, dtype=decoder.dtype, device=device)
    adapter = pool.create(LoraConfig(rank=RANK, seed=0))
    sampler = Sampler(decoder, pool, cache_tokens=case.rows * case.context, max_rows=case.rows)
    trainer = Trainer(
        decoder,
        pool,
        token_budget=plan.micro_batch_tokens,
        checkpointing="offload" if plan.offloaded_bytes else True,
    )
    work = TrainWork((case.context,) * (plan.micro_batch_tokens // case.context if device.type == "cuda" else 1))
    items = [item_of(adapter, tokens) for tokens in work.data(spec.vocab_size)]
    requests = [
        SampleRequest(
            prompt=tuple(range(seed, seed + case.context - ANSWER)),
            params=SamplingParams(max_tokens=ANSWER, seed=seed, stop_token_ids=()),
        )
        for seed in range(case.rows)
    ]

    def train() -> None:
        trainer.forward_backward(items)
        trainer.optim_step({adapter: AdamParams()})

    def sample() -> None:
        sampler.generate(requests, [adapter] * case.rows)

    rates = {}
    for turn in ("first", "second"):  # the first one warms up
        progress.say(f"{what}: the {turn} step, at {memory.peak_bytes() / GB:.1f} GB")
        rates = {
            "training": work.tokens / timed(train, device),
            "sampling, prompts in the clock": case.rows * ANSWER / timed(sample, device),
        }
    rows = _memory_rows(what, case, plan, loaded, memory.peak_bytes())
    return [*rows, *(Row(f"{what}: {name}", "tok/s", Measure((rate,))) for name, rate in rates.items())]


def _memory_rows(what: str, case: Case, plan: MemoryPlan, loaded: int, peak: int) -> list[Row]:
    def row(name: str, measured: int, planned: int, target: int | None = None) -> Row:
        return Row(
            *(f"{what}: {name}", "GB", Measure((measured / GB,)), "planned", Measure((planned / GB,))),
            target_value=None if target is None else target / GB,
            less_is_better=True,
        )

    return [
        row("weights, while they are loaded", loaded, plan.weights_bytes),
        row("peak of training and sampling", peak, plan.total_bytes, case.memory_bytes),
    ]


def kv_rows(device: torch.device) -> list[Row]:
    """What a token takes of the cache in bfloat16, measured over a cache of published layers that is filled."""
    rows, caches = [], []  # all are kept, or the next one would take the memory of the last
    for what, config in PUBLISHED.items():
        spec = ModelSpec.from_config(config)
        gc.collect()
        before = _held(device)
        cache = KVCache(spec, KV_TOKENS // 16, 16, dtype=torch.bfloat16, device=device)
        cache.clear(np.arange(KV_TOKENS // 16))
        measured = (_held(device) - before) / KV_TOKENS / 1024
        caches.append(cache)
        planned = spec.kv_numbers_per_token * 2 / 1024
        name = f"{what}: keys and values of a token"
        rows.append(Row(name, "KiB", Measure((measured,)), "computed", Measure((planned,)), less_is_better=True))
    return rows


def _held(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else psutil.Process().memory_info().rss


def main() -> None:
    parser = argument_parser("memory", __doc__ or "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--weights", choices=list(FORMS), help="instead of nf4")
    parser.add_argument("--shape", type=some_of("shape", tuple(SHAPES)), help="only these of its models")
    args = parser.parse_args()
    cases = ON_GPU if args.device == "cuda" else ON_CPU
    if args.device == "cuda":
        set_numerics("exact")
    rows, progress = [], Progress()
    for case in cases:
        if args.shape is None or case.shape in args.shape:
            rows += run(replace(case, weights=args.weights or case.weights), torch.device(args.device), progress)
    if args.shape is None:
        rows += kv_rows(torch.device(args.device))
    progress.done()
    report(Report("memory", machine(), versions(["palestra", "torch"]), rows), json_line=args.json)


if __name__ == "__main__":
    main()
