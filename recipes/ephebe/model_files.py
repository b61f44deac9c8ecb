"""Writing what a recipe has made: the model's folder and a log. Needs nothing of the package."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM


def write_model(model: Qwen3ForCausalLM, folder: Path, end: int, pad: int, card: Path) -> None:
    """Weights, config and model card; the tokenizer's files are written by others."""
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **model.config.to_diff_dict(),
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "compute_dtype": "float32",  # for Palestra; other libraries compute in the dtype of the files
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    shutil.copyfile(card, folder / "README.md")


def log(begin: float, text: str) -> None:
    print(f"{time.monotonic() - begin:7.1f} s  {text}", flush=True)
