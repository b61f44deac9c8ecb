"""A base model across two processes: each reads and holds its half of the layers, and gathers them to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import palestra

pytestmark = pytest.mark.distributed


def life(folder: str, meeting: str, rank: int, ranks: int) -> dict[str, Any]:
    """Loads the model and computes, as one of several ranks; what it held, read and found."""
    import torch

    from palestra.engine.ranks.process_group import ProcessGroup
    from palestra.model import AdapterPool, Trainer, TrainItem, encode, load_model
    from palestra.model.loading.safetensors_file import SafetensorsFile
    from palestra.model.loading.weights import MlpWeights
    from palestra.types import Datum, LoraConfig

    read, fill = [], SafetensorsFile._fill

    def count(self: SafetensorsFile, place: torch.Tensor, start: int) -> None:
        read.append(place.nbytes)
        fill(self, place, start)

    SafetensorsFile._fill = count
    mesh = None
    if ranks > 1:
        mesh = ProcessGroup(meeting, rank, ranks, torch.device("cpu")).shard_mesh(ranks)
    decoder = load_model(folder, mesh=mesh).decoder
    pool = AdapterPool(decoder.spec)
    trainer, adapter = Trainer(decoder, pool), pool.create(LoraConfig(rank=4, seed=1))
    tokens = np.arange(40) % decoder.spec.vocab_size
    datum = Datum.of_tokens(tokens[:-1].tolist(), target_tokens=encode(tokens[1:]))
    (result,) = trainer.forward_backward([TrainItem(adapter, datum)])
    sharded: Any = decoder.sharded
    gathered: list[Any] = [layer.mlp.down for layer in decoder.weights.layers if isinstance(layer.mlp, MlpWeights)]
    products = [] if sharded is None else list(sharded.stack.parameters())
    return {
        "read": sum(read),
        "held": sum(product.to_local().nbytes for product in products),
        "whole": sum(product.nbytes for product in products),
        "gathered": sum(product.untyped_storage().size() for product in gathered),
        "found": [result.loss, adapter.row("grads").numpy().tobytes().hex()],
    }


def run(folder: Path, meeting: Path, ranks: int) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(palestra.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, __file__, str(folder), str(meeting), str(rank), str(ranks)] for rank in range(ranks)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for command in commands]
    return [json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in processes]


def test_each_process_reads_and_holds_its_half_and_gathers_the_same_bits(micro_model: Path, tmp_path: Path) -> None:
    (alone,) = run(micro_model, tmp_path, 1)
    two = run(micro_model, tmp_path, 2)
    for rank in two:
        assert rank["found"] == alone["found"]
        assert rank["held"] * 2 == rank["whole"] > 0
        assert rank["gathered"] == 0  # what was gathered is dropped when a layer has computed
        assert rank["read"] == alone["read"] - rank["whole"] // 2


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4", "qwen3_moe", "gpt_oss"])
def test_other_mixers_and_experts_gather_the_same_bits(random_model: Any, family: str, tmp_path: Path) -> None:
    (alone,), two = run(random_model(family), tmp_path, 1), run(random_model(family), tmp_path, 2)
    for rank in two:
        assert rank["found"] == alone["found"]
        assert rank["held"] * 2 == rank["whole"] > 0


if __name__ == "__main__":
    print(json.dumps(life(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
