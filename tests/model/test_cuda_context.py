"""Ranks that compute every micro-batch together on a GPU: in bfloat16 every row has the bits of one process.

There is one card: a group of one meets by NCCL, two ranks share the card and exchange through the host, by gloo.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import palestra

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FAMILIES = ("qwen3", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "qwen3_moe", "gemma4")
LENGTHS = (700, 1300, 90, 1)
LONG = 32_768


def context_of(folder: Path, ranks: int, rank: int) -> Any:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from palestra.model.context_group import ContextGroup

    class ThroughTheHost(ContextGroup):
        def exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
            return ContextGroup.exchange(self, x.cpu(), sent, received).to(x.device)

    meeting = FileStore(str(folder / f"meeting-of-{ranks}"), ranks)
    if ranks == 1:
        dist.init_process_group("nccl", store=meeting, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    else:
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    return (ContextGroup if ranks == 1 else ThroughTheHost)(rank, ranks, group)


def life(folder: Path, ranks: int, rank: int, what: str) -> Iterator[dict[str, Any]]:
    torch.cuda.set_device("cuda:0")
    context = context_of(folder, ranks, rank) if ranks else None
    if what == "long":
        from palestra.testing.drawn_model import draw_model

        decoder = draw_model("qwen3", "qwen3-4b", "bfloat16", "cuda:0").decoder
        yield train(decoder, context, [LONG], folder / f"{what}-{ranks}-{rank}.npy", checkpointing=True)
        return
    from palestra.model import load_model

    for family in FAMILIES:
        decoder = load_model(folder / family, dtype="bfloat16", device="cuda:0").decoder
        yield train(decoder, context, [40 + n for n in LENGTHS], folder / f"{family}-{ranks}-{rank}.npy")


def train(decoder: Any, context: Any, lengths: list[int], file: Path, *, checkpointing: bool = False) -> dict[str, Any]:
    """The digest of all log-probabilities, visits, where the gradient is, and the most memory beside the weights. Data
    begin with the same tokens."""
    from palestra.model import AdapterPool, Trainer, TrainItem, encode
    from palestra.types import Datum, LoraConfig

    pool = AdapterPool(decoder.spec, dtype=decoder.dtype, device=decoder.device)
    trainer = Trainer(decoder, pool, checkpointing=checkpointing, context=context)
    adapter = pool.create(LoraConfig(rank=8, seed=1))
    noise = torch.randn(adapter.stack.layout.size, generator=torch.Generator().manual_seed(0))
    pool.before_change(adapter)
    adapter.row("weights").add_(noise.cuda(), alpha=0.02)
    pool.after_change(adapter)
    rng, items = np.random.default_rng(0), []
    common = rng.integers(0, 500, 40)
    for length in lengths:
        tokens = np.concatenate([common, rng.integers(0, 500, length - 39)])
        items.append(TrainItem(adapter, Datum.of_tokens(tokens[:-1].tolist(), target_tokens=encode(tokens[1:]))))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    done = trainer.forward_micro(trainer.prepare(items, train=True), train=True)
    logprobs = b"".join(np.ascontiguousarray(result.logprobs).tobytes() for result in done.results)
    visits = [None if result.visits is None else int(result.visits.sum()) for result in done.results]
    trainer.backward(done)
    peak = torch.cuda.max_memory_allocated() - before
    adapter.stack.collect_gradient(adapter.slot)
    np.save(file, adapter.row("grads").cpu().numpy())
    digest = hashlib.sha256(logprobs).hexdigest()
    return {"name": file.name.split("-")[0], "logprobs": digest, "visits": visits, "file": str(file), "peak": peak}


def run(folder: Path, ranks: int, what: str) -> list[list[dict[str, Any]]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(palestra.__file__).parents[1]), *sys.path])}
    commands = [[sys.executable, __file__, str(folder), str(ranks), str(rank), what] for rank in range(max(1, ranks))]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for command in commands]
    outputs = [process.communicate(timeout=500)[0].splitlines() for process in processes]
    return [[json.loads(line) for line in output if line.startswith(b"{")] for output in outputs]


def test_every_row_has_the_bits_of_one_process(tmp_path: Path) -> None:
    from palestra.testing.random_model import make_random_model

    for family in FAMILIES:
        make_random_model(tmp_path / family, family=family, shape="tiny", dtype="bfloat16")
    (alone,), (of_one,), two = (run(tmp_path, ranks, "families") for ranks in (0, 1, 2))
    assert [found["name"] for found in alone] == list(FAMILIES)
    for n, expected in enumerate(alone):
        family = expected["name"]
        gradient = np.load(expected["file"])
        for found in (of_one[n], two[0][n], two[1][n]):
            assert (found["logprobs"], found["visits"]) == (expected["logprobs"], expected["visits"]), family
        np.testing.assert_array_equal(np.load(of_one[n]["file"]), gradient, err_msg=family)
        distance = distance_of(two[0][n], two[1][n], expected)
        print(f"{family}: gradients of two ranks are {distance:.1e} from those of one")
        assert distance < 2e-2, family  # bfloat16: gradients of keys that both ranks have are rounded at each


def distance_of(first: dict[str, Any], second: dict[str, Any], alone: dict[str, Any]) -> float:
    expected = np.load(alone["file"])
    return float(np.linalg.norm(np.load(first["file"]) + np.load(second["file"]) - expected) / np.linalg.norm(expected))


def test_each_rank_holds_its_half_of_a_long_sequence(tmp_path: Path) -> None:
    ((alone,),), ((first,), (second,)) = (run(tmp_path, ranks, "long") for ranks in (0, 2))
    assert first["logprobs"] == second["logprobs"] == alone["logprobs"]
    peaks = [found["peak"] / 1e9 for found in (alone, first, second)]
    print(f"{LONG} tokens of 4B: {peaks} GB, gradients {distance_of(first, second, alone):.1e} apart")
    assert max(peaks[1:]) < 0.65 * peaks[0]
    assert distance_of(first, second, alone) < 2e-2


if __name__ == "__main__":
    for one in life(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]):
        print(json.dumps(one), flush=True)
