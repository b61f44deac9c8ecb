"""llama.cpp, as `make llama-cpp` builds it, reads our GGUF files: the same tokens, the same log-probabilities."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from palestra.checkpoints.export import export_checkpoint
from palestra.checkpoints.gguf import ADAPTER_FILE, MODEL_FILE
from palestra.model import AdapterPool, Trainer, TrainItem, encode, load_model
from palestra.model.lora.adapter_files import load_adapter
from palestra.runs.export_form import GgufSettings
from palestra.types import Datum
from tests.checkpoints.conftest import write_adapter
from tests.checkpoints.gguf_models import TEXTS, with_qwen_words, with_sentencepiece

PYTHON = Path(__file__).parents[2] / ".venv-llama" / "bin" / "python"
SCORES = Path(__file__).with_name("llama_cpp_scores.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="llama.cpp is not built; run: make llama-cpp"),
]
EXACT = 2e-5
GELU = 3e-3  # llama.cpp reads it from a table in float16
SLOWEST = 1e-3  # llama.cpp does not turn the slowest pairs of Qwen3-VL's heads by the positions of text
TOKENS = np.random.default_rng(0).integers(0, 500, 96).tolist()

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
GPT_OSS = YARN | {"factor": 32.0, "original_max_position_embeddings": 128, "rope_theta": 150000.0}
PUBLISHED_GPT_OSS = {
    "head_dim": 64,
    "rope_parameters": GPT_OSS | {"original_max_position_embeddings": 4096, "truncate": False},
}  # llama.cpp rounds where YaRN's ramp begins and ends
QWEN35 = {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e7, "mrope_section": [1, 1, 0]}}
FOUR_LAYERS = QWEN35 | {
    "num_hidden_layers": 5,
    "layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
}
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.0, 1.1, 1.2, 1.5, 2.0],
        "long_factor": [1.0, 1.5, 3.0, 8.0, 16.0, 32.0],
        "original_max_position_embeddings": 512,
    },
    "original_max_position_embeddings": 512,
}
DENSE_NEMOTRON = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
SPARSE_NEMOTRON = {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
SHARED_KEYS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
OVERRIDES = {
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_5": QWEN35,
    "qwen3_5_moe": QWEN35,
    "gpt_oss": {"rope_parameters": GPT_OSS},
    "nemotron_h": SPARSE_NEMOTRON,
}
CASES = {
    "llama": ({"family": "llama"}, EXACT),
    "llama 3": (
        {"family": "llama", "overrides": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}},
        EXACT,
    ),
    "llama with biases": ({"family": "llama", "overrides": {"attention_bias": True, "mlp_bias": True}}, EXACT),
    "mistral": ({"family": "mistral", "overrides": {"sliding_window": None}}, EXACT),
    "qwen2": ({"family": "qwen2"}, EXACT),
    "qwen3": ({"family": "qwen3"}, EXACT),
    "qwen3, not tied": ({"family": "qwen3", "tie": False}, EXACT),
    "qwen3, long": ({"family": "qwen3", "overrides": {"rope_parameters": YARN}}, EXACT),
    "qwen3 with experts": ({"family": "qwen3_moe", "overrides": {"norm_topk_prob": True}}, EXACT),
    "olmo2": ({"family": "olmo2", "tie": False}, EXACT),
    "smollm3": ({"family": "smollm3", "overrides": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}}, EXACT),
    "granite": ({"family": "granite"}, EXACT),
    "seed_oss": ({"family": "seed_oss"}, EXACT),
    "phi3": ({"family": "phi3"}, EXACT),
    "phi3, long": ({"family": "phi3", "overrides": LONGROPE}, EXACT),
    "olmo3": ({"family": "olmo3"}, EXACT),
    "ministral3": ({"family": "ministral3"}, EXACT),
    "qwen3_next": ({"family": "qwen3_next"}, EXACT),
    "glm4_moe": ({"family": "glm4_moe"}, EXACT),
    "glm4_moe_lite": ({"family": "glm4_moe_lite"}, EXACT),
    "deepseek_v3": ({"family": "deepseek_v3"}, EXACT),
    "nemotron_h": ({"family": "nemotron_h", "overrides": DENSE_NEMOTRON}, EXACT),
    "nemotron_h with experts": ({"family": "nemotron_h", "overrides": SPARSE_NEMOTRON}, EXACT),
    "qwen3.5": ({"family": "qwen3_5", "overrides": QWEN35}, EXACT),
    "qwen3.5, four layers": ({"family": "qwen3_5", "overrides": FOUR_LAYERS}, EXACT),
    "qwen3.5 with experts": ({"family": "qwen3_5_moe", "overrides": QWEN35}, EXACT),
    "qwen3_vl": ({"family": "qwen3_vl"}, SLOWEST),
    "qwen3_vl with experts": ({"family": "qwen3_vl_moe"}, SLOWEST),
    "gpt-oss": ({"family": "gpt_oss", "overrides": {"rope_parameters": GPT_OSS}}, EXACT),
    "gpt-oss as published": ({"family": "gpt_oss", "overrides": PUBLISHED_GPT_OSS}, 0.1),
    "gemma3": ({"family": "gemma3"}, GELU),
    "gemma4": ({"family": "gemma4"}, GELU),
    "gemma4, tied": ({"family": "gemma4", "tie": True, "overrides": {"sliding_window": 16}}, GELU),
    "gemma4 with shared keys": ({"family": "gemma4", "overrides": SHARED_KEYS}, GELU),
    "gemma4 with experts": ({"family": "gemma4_moe"}, GELU),
    "gemma3 with windows": ({"family": "gemma3", "overrides": {"sliding_window": 16}}, GELU),
}


def _ours(base: Path, adapter: Path) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the tokens with the adapter, and without it."""
    model = load_model(base, dtype="float32")
    pool = AdapterPool(model.spec)
    datum = Datum.of_tokens(TOKENS[:-1], target_tokens=encode(np.array(TOKENS[1:])))
    items = [TrainItem(load_adapter(pool, adapter), datum), TrainItem(None, datum)]
    trained, plain = (result.logprobs for result in Trainer(model.decoder, pool).forward(items))
    return trained, plain


def _theirs(model: Path, adapter: Path | None = None) -> tuple[np.ndarray, list[list[int]]]:
    """Log-probabilities of the same tokens, and the tokens of the texts."""
    asked = {"model": str(model), "adapter": adapter and str(adapter), "texts": TEXTS, "tokens": TOKENS}
    done = subprocess.run([PYTHON, SCORES], input=json.dumps(asked), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return np.array(found["logprobs"]), found["tokens"]


@pytest.mark.parametrize("case", CASES)
def test_a_merged_file_has_our_log_probabilities_and_tokens(case, random_model, tmp_path):
    options, allowed = CASES[case]
    base = with_qwen_words(random_model(**options), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3, train_unembed=True)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base)
    trained, plain = _ours(base, tmp_path / "adapter")
    found, tokens = _theirs(tmp_path / "out" / MODEL_FILE)
    assert np.abs(found - trained).mean() < allowed < 1 < np.abs(plain - trained).mean()
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    assert tokens == [tokenizer.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize(("quant", "allowed"), [("f16", 5e-3), ("bf16", 0.1), ("q8_0", 0.2), ("q4_0", 2.0)])
def test_a_file_of_fewer_bits_is_off_by_its_error_only(quant, allowed, random_model, tmp_path):
    base = with_qwen_words(random_model(), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base, gguf=GgufSettings(quant))
    trained, _ = _ours(base, tmp_path / "adapter")
    assert np.abs(_theirs(tmp_path / "out" / MODEL_FILE)[0] - trained).mean() < allowed


ADAPTERS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3": {},
    "qwen3_moe": {},
    "qwen3_moe, each": {"per_expert": True},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "gpt_oss": {},
    "gemma4": {},
    "gemma4_moe": {"train_mlp": False},
    "phi3": {},
    "ministral3": {},
    "qwen3_next": {},
    "glm4_moe": {},
    "deepseek_v3": {"train_attn": False, "train_unembed": False},
    "nemotron_h": {},
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_file_does_to_its_base_what_the_adapter_does(case, random_model, tmp_path):
    family = case.partition(",")[0]
    overrides = OVERRIDES.get(family, {})
    base = with_qwen_words(random_model(family=family, tie=False, overrides=overrides), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3, **{"train_unembed": True} | ADAPTERS[case])
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf-adapter", base=base)
    write_adapter(base, tmp_path / "nothing", 0, scale=0.0)
    export_checkpoint(tmp_path / "nothing", tmp_path / "base-gguf", "gguf", base=base)
    trained, plain = _ours(base, tmp_path / "adapter")
    allowed = GELU if family.startswith("gemma") else EXACT
    model = tmp_path / "base-gguf" / MODEL_FILE
    assert np.abs(_theirs(model)[0] - plain).mean() < allowed
    assert np.abs(_theirs(model, tmp_path / "out" / ADAPTER_FILE)[0] - trained).mean() < allowed


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_sentencepiece_tokenizer_makes_our_tokens(family, random_model, tmp_path):
    base = with_sentencepiece(random_model(family=family, vocab_size=700), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    start = [2] if family == "gemma4" else []  # which llama.cpp puts before all texts of Gemma 4
    assert _theirs(tmp_path / "out" / MODEL_FILE)[1] == [start + tokenizer.encode(text).ids for text in TEXTS]
