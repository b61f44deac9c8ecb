"""Which published sizes fit which card: the table of docs/models.md, from the code of `palestra model info --plan`.

python scripts/model_sizes.py
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

from palestra.memory_plan.model_plan import PlanRequest, plan_memory
from palestra.model.loading.parameter_counts import count_parameters
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weight_files import WeightFiles
from palestra.testing.random_config import SHAPES, Shape, random_config
from palestra.testing.random_model import parameters_of

CARDS_GB = (24, 48, 80, 141)
FORMS = ("bf16", "int8", "nf4")
ROWS, CONTEXT, RANK = 8, 4096, 32
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
EVERY_SIXTH = {"layer_types": [("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(60)]}

MODELS: dict[str, tuple[str, Shape, dict[str, Any]]] = {
    "Qwen3-0.6B": ("qwen3", SHAPES["qwen3-0.6b"], {}),
    "Qwen3-4B": ("qwen3", SHAPES["qwen3-4b"], {}),
    "Qwen3.5-4B": ("qwen3_5", SHAPES["qwen3.5-4b"], {}),
    "Qwen3-8B": ("qwen3", SHAPES["qwen3-8b"], {}),
    "Qwen3.5-9B": ("qwen3_5", SHAPES["qwen3.5-9b"], {}),
    "Phi-4 (14B)": ("phi3", Shape(5120, 40, 40, 10, 128, 17920, 100352, tie=False), {"partial_rotary_factor": 1.0}),
    "gpt-oss-20b": ("gpt_oss", SHAPES["gpt-oss-20b"], {}),
    "Gemma 3 27B": ("gemma3", Shape(5376, 62, 32, 16, 128, 21504, 262208, tie=True), {}),
    "Gemma 4 31B": (
        "gemma4",
        Shape(5376, 60, 32, 16, 256, 21504, 262144, tie=True),
        EVERY_SIXTH
        | {
            "attention_k_eq_v": True,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 4,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
        },
    ),
    "GLM-4.7-Flash (30B-A3B)": (
        "glm4_moe_lite",
        Shape(2048, 47, 20, 20, 192, 10240, 154880, tie=False, experts=(64, 4, 1536)),
        {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256},
    ),
    "Qwen3-30B-A3B": ("qwen3_moe", SHAPES["qwen3-30b-a3b"], {}),
    "Nemotron 3 Nano (30B-A3B)": (
        "nemotron_h",
        Shape(2688, 52, 32, 2, 128, 1856, 131072, tie=False, experts=(128, 6, 1856)),
        {
            "layers_block_type": [LETTERS[letter] for letter in NANO],
            "mamba_head_dim": 64,
            "mamba_num_heads": 64,
            "moe_shared_expert_intermediate_size": 3712,
            "n_groups": 8,
            "ssm_state_size": 128,
        },
    ),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe", SHAPES["qwen3.5-35b-a3b"], {}),
    "Seed-OSS-36B": ("seed_oss", Shape(5120, 64, 80, 8, 128, 27648, 155136, tie=False), {}),
    "GLM-4.5-Air (106B-A12B)": (
        "glm4_moe",
        Shape(4096, 46, 96, 8, 128, 10944, 151552, tie=False, experts=(128, 8, 1408)),
        {},
    ),
}


def main() -> None:
    lines = [f"| model | parameters | {' | '.join(f'{card} GB' for card in CARDS_GB)} |"]
    lines.append("| --- | --- |" + " --- |" * len(CARDS_GB))
    for name, (family, shape, overrides) in MODELS.items():
        config = random_config(family, shape, overrides=overrides) | {"dtype": "bfloat16"}
        spec = ModelSpec.from_config(config)
        with tempfile.TemporaryDirectory() as folder:
            write_headers(Path(folder), config)
            with WeightFiles(Path(folder)) as files:
                fits = [_best(files, spec, card) for card in CARDS_GB]
        lines.append(f"| {name} | {count_parameters(spec) / 1e9:.1f} billion | {' | '.join(fits)} |")
    sys.stdout.write("\n".join(lines) + "\n")


def _best(files: WeightFiles, spec: ModelSpec, card_gb: int) -> str:
    """The form with the most bits in which it fits."""
    for form in FORMS:
        request = PlanRequest(card_gb * 10**9, ROWS, CONTEXT, form, RANK)
        if plan_memory(files, spec, request).fits:
            return form
    return "–"


def write_headers(folder: Path, config: dict[str, Any]) -> None:
    """A file with real headers and a hole instead of weights."""
    header, start = {}, 0
    for parameter in parameters_of(config):
        end = start + 2 * prod(parameter.shape)
        header[parameter.name] = {"dtype": "BF16", "shape": parameter.shape, "data_offsets": [start, end]}
        start = end
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + start)


if __name__ == "__main__":
    main()
