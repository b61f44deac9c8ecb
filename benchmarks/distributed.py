"""What training that can be divided costs on one device: a step with 8 gradient shards beside one with 1, and a group
of one rank and layers gathered by FSDP2 from one process beside a worker without either.

    python benchmarks/distributed.py --quick
    python benchmarks/distributed.py --shape qwen3-4b --device cuda

A step is one request of 16 full micro-batches and an optimizer step, by the engine's backend.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Contender, Measure, Progress, Report, Row, alternate, argument_parser, machine, report, versions
from torch.distributed.device_mesh import init_device_mesh

from palestra.engine.ranks.group_backend import GroupBackend
from palestra.engine.torch_backend import TorchBackend
from palestra.engine.torch_trainer import TorchConfig
from palestra.model import encode
from palestra.testing.random_model import SHAPES, make_random_model
from palestra.types import AdamParams, Datum, LoraConfig
from palestra.types.engine import Pass, WorkerConfig

MICRO_BATCHES = 16
LENGTH = 512
SHARDS = 8


def request_of(backend: TorchBackend) -> Pass:
    rng = np.random.default_rng(0)
    length = min(LENGTH, backend.token_budget)
    rows = rng.integers(0, backend.spec.vocab_size, (MICRO_BATCHES * (backend.token_budget // length), length + 1))
    data = [Datum.of_tokens(row[:-1].tolist(), target_tokens=encode(row[1:])) for row in rows]
    return Pass(data=data, loss="cross_entropy")


def contender(backend: TorchBackend, rank: int, gradient_shards: int) -> Contender:
    model, request = backend.create(LoraConfig(rank=rank, seed=0)), request_of(backend)

    def step() -> float:
        backend.gradient_shards = gradient_shards
        start = time.perf_counter()
        parts, begun = backend.plan(model, request), backend.begin_pass(model)
        for part in parts:
            backend.backward(backend.forward([part], train=True))
        backend.end_pass(model, begun)
        outcome = backend.optim_step({model: AdamParams(learning_rate=1e-4)})[model]
        assert isinstance(outcome, dict), outcome
        return sum(part.tokens for part in parts) / (time.perf_counter() - start)

    return step


def main() -> None:
    parser = argument_parser("distributed", __doc__ or "")
    parser.add_argument("--shape", default="tiny", choices=list(SHAPES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        Progress().say(f"random {args.shape}")
        dtype = "float32" if args.device == "cpu" else "bfloat16"
        folder = make_random_model(Path(temporary) / "model", shape=args.shape, dtype=dtype)
        config = WorkerConfig(
            address=f"ipc://{temporary}/link",
            model=str(folder),
            state=f"{temporary}/state",
            devices=(args.device if args.device == "cpu" else "cuda:0",),
            gradient_shards=SHARDS,
            cache_tokens=1024,
        )
        backend, group = TorchBackend(TorchConfig.of(config)), GroupBackend(config)
        gathered = TorchBackend(TorchConfig.of(config), init_device_mesh(args.device.partition(":")[0], (1,)))
        runs = {
            "direct": contender(backend, args.rank, 1),
            "gradient_shards": contender(backend, args.rank, SHARDS),
            "group": contender(group, args.rank, SHARDS),
            "gathered": contender(gathered, args.rank, SHARDS),
        }
        measured = alternate(runs, args.rounds or (3 if args.quick else 9), warmups=1)
        group.close()
    rows = [
        row("gradient shards", "1 gradient shard", measured["gradient_shards"], measured["direct"], 0.97),
        row("gradient shards, a group of one rank", "no group", measured["group"], measured["gradient_shards"], 0.98),
        row(
            "gradient shards, layers gathered by FSDP2",
            "not gathered",
            measured["gathered"],
            measured["gradient_shards"],
            0.9,
        ),
    ]
    report(Report("distributed", machine(), versions(["palestra", "torch"]), rows), json_line=args.json)


def row(what: str, peer: str, ours: Measure, theirs: Measure, target: float) -> Row:
    return Row(
        f"train {MICRO_BATCHES} micro-batches, {SHARDS} {what}", "tok/s", ours, peer, theirs, target_ratio=target
    )


if __name__ == "__main__":
    main()
