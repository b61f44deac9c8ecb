"""A run folder with checkpoints of a model that takes no time to load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from palestra.model import AdapterPool
from palestra.model.loading.spec import ModelSpec
from palestra.model.lora.adapter_files import save_adapter
from palestra.runs import Run
from palestra.types import LoraConfig

MODEL = "0123456789abcdef:train:0"


def write_adapter(base: Path, folder: Path, seed: int, *, scale: float = 0.2, **lora) -> None:
    adapter = AdapterPool(ModelSpec.from_folder(base)).create(LoraConfig(rank=4, alpha=8.0, **lora))
    adapter.row("weights").copy_(
        torch.randn(adapter.stack.layout.size, generator=torch.Generator().manual_seed(seed)) * scale
    )
    save_adapter(adapter, folder, base_model=str(base), optimizer=True)


@pytest.fixture
def run(tmp_path: Path, micro_model: Path) -> Run:
    """A run folder with three checkpoints, of which the second was the best and the third was saved twice."""
    folder = tmp_path / "runs" / "first"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": {"server": None}, "kind": "grpo"}))
    weights = folder / "engine" / "checkpoints" / MODEL.replace(":", "_") / "weights"
    rows = []
    for step, success in ((2, 0.25), (4, 0.75), (6, 0.5)):
        name = f"step_{step:06d}"
        pointer = {"step": step, "position": 0, "address": f"tinker://{MODEL}/weights/{name}"}
        (folder / "checkpoints" / f"{name}.json").write_text(json.dumps(pointer))
        write_adapter(micro_model, weights / f"{name}@{step + 1}", step)
        metrics = {"eval/success": success, "reward/mean": step / 10, "loss/mean": step / 100}
        rows.append({"step": step, "attempt": 1, "time": 1.0, **metrics})
    write_adapter(micro_model, weights / "step_000006@10", 10)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Run(folder)
