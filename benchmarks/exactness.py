"""How far the sampler's log-probabilities are from the trainer's, and whether a request notices who shares its batch.

    python benchmarks/exactness.py --device cuda
    python benchmarks/exactness.py --device cuda --models qwen3.5-9b,nemotron-3-nano --forms bf16,nf4
    python benchmarks/exactness.py --device cuda --models qwen3.5-9b --forms bf16 --whole

A cell draws a model with published widths (four layers; all of them with --whole) in one form of its weights, samples
requests of the base model, of one adapter and of fifteen others in one batch, through graphs, prompts cut in parts and
preemptions, and asks the trainer for the same tokens. Then some of the requests are sampled again, each alone.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from harness import Progress, argument_parser, machine, some_of, versions

from palestra.model import Adapter, AdapterPool, Model, Sampler, Trainer, TrainItem, encode
from palestra.model.quantised.forms import FORM_NAMES, FORMS
from palestra.testing.drawn_model import draw_model
from palestra.testing.random_model import SHAPES
from palestra.types import Datum, LoraConfig, SampledSequence, SampleRequest, SamplingParams

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
FEW = 4
"""Layers, without --whole."""
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-4b": ("qwen3", "qwen3-4b", {}),
    "qwen3-30b-a3b": ("qwen3_moe", "qwen3-30b-a3b", {}),
    "gpt-oss-20b": ("gpt_oss", "gpt-oss-20b", {}),
    "qwen3.5-9b": ("qwen3_5", "qwen3.5-9b", {}),
    "qwen3.5-35b-a3b": ("qwen3_5_moe", "qwen3.5-35b-a3b", {}),
    "nemotron-3-nano": ("nemotron_h", "nemotron-3-nano", {"mamba_head_dim": 64, "n_groups": 8}),
    "gemma4": ("gemma4", "small", {"head_dim": 256, "global_head_dim": 512}),
    "glm4_moe_lite": ("glm4_moe_lite", "small", LATENT | {"num_attention_heads": 20}),
}
"""Family, shape, and what is changed of it. The last two have published heads only."""
RANKS = (8, 16, 32, 64)
N_REQUESTS, N_ALONE, N_TOKENS = 34, 6, 48


@dataclass(frozen=True, slots=True)
class Gap:
    """The distance of the sampler's log-probabilities from the trainer's, in nats."""

    tokens: int
    unequal: int
    mean: float
    most: float

    @classmethod
    def of(cls, gaps: Sequence[np.ndarray]) -> Gap:
        every = np.abs(np.concatenate(gaps))
        return cls(len(every), int((every > 0).sum()), float(every.mean()), float(every.max()))

    def __str__(self) -> str:
        if not self.unequal:
            return "0"
        return f"{self.mean:.2g} (max {self.most:.2g}, {self.unequal} of {self.tokens})"


@dataclass(frozen=True, slots=True)
class Cell:
    model: str
    form: str
    base: Gap
    one_adapter: Gap
    sixteen: Gap
    alone: int
    """Requests that got other tokens or log-probabilities alone than in the batch, of `N_ALONE`."""

    @property
    def is_exact(self) -> bool:
        return not (self.base.unequal or self.one_adapter.unequal or self.sixteen.unequal or self.alone)


def measure(name: str, form: str, model: Model, device: str) -> Cell:
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=device)
    adapters = [pool.create(LoraConfig(rank=RANKS[i % 4], seed=i, train_unembed=False)) for i in range(16)]
    for adapter in adapters:
        pool.before_change(adapter)
        adapter.row("weights").normal_(0, 0.01, generator=torch.Generator(device).manual_seed(adapter.uid))
        pool.after_change(adapter)
    requests = list(_requests(model.spec.vocab_size))
    owners: list[Adapter | None] = [[None, adapters[0], adapters[i % 16]][i % 3] for i in range(len(requests))]
    room = sum(len(one.prompt) + 2 * N_TOKENS for one in requests)
    sampler = Sampler(model.decoder, pool, cache_tokens=room // 2, prefill_tokens=512)
    results = [result.sequences for result in sampler.generate(requests, owners)]
    trainer = Trainer(model.decoder, pool)
    gaps: list[list[np.ndarray]] = [[], [], []]
    for i, (request, owner, sequences) in enumerate(zip(requests, owners, results, strict=True)):
        for sequence, trained in zip(sequences, _trained(trainer, request, owner, sequences), strict=True):
            gaps[i % 3].append(trained - np.array(sequence.logprobs))
    lone = Sampler(model.decoder, pool, cache_tokens=8192)
    alone = sum(lone.generate([requests[i]], [owners[i]])[0].sequences != results[i] for i in range(N_ALONE))
    base, one_adapter, sixteen = map(Gap.of, gaps)
    return Cell(name, form, base, one_adapter, sixteen, alone)


def _requests(vocab_size: int) -> Iterator[SampleRequest]:
    rng = np.random.default_rng(3)
    for seed, length in enumerate(rng.integers(5, 700, N_REQUESTS)):
        prompt = tuple(rng.integers(0, vocab_size, length).tolist())
        params = SamplingParams(max_tokens=N_TOKENS, seed=seed, stop_token_ids=())
        yield SampleRequest(prompt=prompt, num_samples=2, params=params)


def _trained(
    trainer: Trainer, request: SampleRequest, owner: Adapter | None, sequences: Sequence[SampledSequence]
) -> Iterator[np.ndarray]:
    items = []
    for sequence in sequences:
        tokens = [*request.prompt, *sequence.tokens]
        items.append(TrainItem(owner, Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))))
    for result in trainer.forward(items):
        yield result.logprobs[len(request.prompt) - 1 :]


def main() -> int:
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; run with --device cpu, or see: palestra doctor", file=sys.stderr)
        return 2
    progress, cells = Progress(), []
    for name in args.models:
        family, sizes, overrides = MODELS[name]
        shape = SHAPES[sizes] if args.whole else replace(SHAPES[sizes], layers=FEW)
        for form in args.forms:
            progress.doing(f"{name} in {form}")
            begin, packed = time.monotonic(), FORMS.get(form)
            model = draw_model(family, shape, args.dtype, args.device, overrides, form=packed)
            cells.append(cell := measure(name, form, model, args.device))
            progress.say(
                f"{name} in {form}: base {cell.base}, one adapter {cell.one_adapter}, sixteen {cell.sixteen}, "
                f"alone {cell.alone} of {N_ALONE} differ; {time.monotonic() - begin:.0f} s"
            )
            del model
            gc.collect()
            torch.cuda.empty_cache()
    progress.done()
    print(table(cells))
    print(f"\n{machine()}\n{versions(('palestra', 'torch'))}")
    return 0 if all(cell.is_exact for cell in cells) else 1


def table(cells: Sequence[Cell]) -> str:
    lines = ["| model | weights | base | one adapter | sixteen adapters | other alone |", "| --- " * 6 + "|"]
    for cell in cells:
        shown = (cell.model, cell.form, cell.base, cell.one_adapter, cell.sixteen, f"{cell.alone} of {N_ALONE}")
        lines.append("| " + " | ".join(map(str, shown)) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argument_parser("exactness", "How far the sampler is from the trainer.")
    forms = ("bf16", *FORM_NAMES)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--models", type=some_of("model", tuple(MODELS)), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--forms", type=some_of("form", forms), default=list(forms), help=", ".join(forms))
    parser.add_argument("--whole", action="store_true", help="with all layers, not with the first four")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
