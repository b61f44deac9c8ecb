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


def life(folder: Path, ranks: int, rank: int) -> Iterator[dict[str, Any]]:
    """For each family: the digest of all log-probabilities, visits, and where the gradient is."""
    from palestra.model import AdapterPool, Trainer, TrainItem, encode, load_model
    from palestra.types import Datum, LoraConfig

    torch.cuda.set_device("cuda:0")
    context = context_of(folder, ranks, rank) if ranks else None
    for family in FAMILIES:
        decoder = load_model(folder / family, dtype="bfloat16", device="cuda:0").decoder
        pool = AdapterPool(decoder.spec, dtype=decoder.dtype, device=decoder.device)
        trainer, adapter = Trainer(decoder, pool, context=context), pool.create(LoraConfig(rank=8, seed=1))
        noise = torch.randn(adapter.stack.layout.size, generator=torch.Generator().manual_seed(0))
        pool.before_change(adapter)
        adapter.row("weights").add_(noise.cuda(), alpha=0.02)
        pool.after_change(adapter)
        rng, items = np.random.default_rng(0), []
        common = rng.integers(0, 500, 40)
        for length in LENGTHS:
            tokens = np.concatenate([common, rng.integers(0, 500, length + 1)])
            items.append(TrainItem(adapter, Datum.of_tokens(tokens[:-1].tolist(), target_tokens=encode(tokens[1:]))))
        done = trainer.forward_micro(trainer.prepare(items, train=True), train=True)
        logprobs = b"".join(np.ascontiguousarray(result.logprobs).tobytes() for result in done.results)
        visits = [None if result.visits is None else int(result.visits.sum()) for result in done.results]
        trainer.backward(done)
        adapter.stack.collect_gradient(adapter.slot)
        file = folder / f"{family}-{ranks}-{rank}.npy"
        np.save(file, adapter.row("grads").cpu().numpy())
        yield {"family": family, "logprobs": hashlib.sha256(logprobs).hexdigest(), "visits": visits, "file": str(file)}


def run(folder: Path, ranks: int) -> list[list[dict[str, Any]]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(palestra.__file__).parents[1]), *sys.path])}
    commands = [[sys.executable, __file__, str(folder), str(ranks), str(rank)] for rank in range(max(1, ranks))]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for command in commands]
    outputs = [process.communicate(timeout=500)[0].splitlines() for process in processes]
    return [[json.loads(line) for line in output if line.startswith(b"{")] for output in outputs]


def test_every_row_has_the_bits_of_one_process(tmp_path: Path) -> None:
    from palestra.testing.random_model import make_random_model

    for family in FAMILIES:
        make_random_model(tmp_path / family, family=family, shape="tiny", dtype="bfloat16")
    (alone,), (of_one,), two = (run(tmp_path, ranks) for ranks in (0, 1, 2))
    assert [found["family"] for found in alone] == list(FAMILIES)
    for n, expected in enumerate(alone):
        family = expected["family"]
        gradient = np.load(expected["file"])
        for found in (of_one[n], two[0][n], two[1][n]):
            assert (found["logprobs"], found["visits"]) == (expected["logprobs"], expected["visits"]), family
        np.testing.assert_array_equal(np.load(of_one[n]["file"]), gradient, err_msg=family)
        total = np.load(two[0][n]["file"]) + np.load(two[1][n]["file"])
        distance = np.linalg.norm(total - gradient) / np.linalg.norm(gradient)
        print(f"{family}: gradients of two ranks are {distance:.1e} from those of one")
        assert distance < 2e-2, family  # bfloat16: gradients of keys that both ranks have are rounded at each


if __name__ == "__main__":
    for one in life(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])):
        print(json.dumps(one), flush=True)
