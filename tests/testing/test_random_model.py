"""Random models are real ones: transformers loads them, and the same seed gives the same bytes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from palestra.testing.random_model import SHAPES, make_random_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}

VARIANTS = {
    "qwen3": {"family": "qwen3"},
    "qwen3-tied": {"family": "qwen3", "tie": True},
    "qwen3-bias": {"family": "qwen3", "overrides": {"attention_bias": True}},
    "qwen2": {"family": "qwen2"},
    "qwen2-window": {
        "family": "qwen2",
        "overrides": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    },
    "llama2": {"family": "llama"},
    "llama-bias": {"family": "llama", "overrides": {"attention_bias": True, "mlp_bias": True}},
    "llama3": {"family": "llama", "overrides": {"rope_parameters": LLAMA3_ROPE}},
    "llama-yarn": {"family": "llama", "overrides": {"rope_parameters": YARN_ROPE}},
    "llama-linear-old-keys": {
        "family": "llama",
        "overrides": {"rope_theta": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    },
    "mistral": {"family": "mistral"},
    "qwen3_5": {"family": "qwen3_5"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "qwen3_5_moe": {"family": "qwen3_5_moe"},
    "qwen3_next": {"family": "qwen3_next"},
    "ministral3": {"family": "ministral3"},
    "phi3": {"family": "phi3"},
    "olmo2": {"family": "olmo2"},
    "olmo3": {"family": "olmo3"},
    "smollm3": {"family": "smollm3"},
    "granite": {"family": "granite"},
    "gemma3": {"family": "gemma3"},
    "glm4_moe": {"family": "glm4_moe"},
    "glm4_moe_lite": {"family": "glm4_moe_lite"},
    "deepseek_v3": {"family": "deepseek_v3"},
    "seed_oss": {"family": "seed_oss"},
    "sharded": {"family": "qwen3", "shards": 3},
}

TEXTS = [
    "The palestra was a school for wrestlers.",
    "  Zoë paid 1234.50 €,\n\n\tnot 99 — isn't it?  \r\n",
    "日本語 עברית 🙂🚀 \x00\x7f",
    "<think>\nwhy\n</think>\n\n<tool_call>\n{}\n</tool_call>",
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_loads_every_weight_and_no_other(random_model, variant):
    from transformers import AutoModelForCausalLM

    folder = random_model(**VARIANTS[variant])
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    logits = model(torch.arange(24)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 1.5  # separated, not flat


def test_overrides_arrive_in_the_config(random_model):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(random_model(**VARIANTS["llama-linear-old-keys"]))
    assert config.rope_parameters["factor"] == 2.0
    assert config.rope_parameters["rope_theta"] == 2e4
    windowed = AutoConfig.from_pretrained(random_model(**VARIANTS["qwen2-window"]))
    assert windowed.layer_types == ["full_attention", "sliding_attention"]


def test_norms_and_biases_are_not_neutral(random_model):
    weights = load_file(random_model(family="qwen2") / "model.safetensors")
    for name, tensor in weights.items():
        if "norm" in name:
            assert (tensor != 1).all(), name
        if name.endswith("bias"):
            assert (tensor != 0).all(), name


def test_bfloat16_is_stored_as_such(random_model):
    from transformers import AutoModelForCausalLM

    folder = random_model(dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.slow
def test_same_seed_gives_the_same_bytes_in_another_process(random_model, tmp_path):
    script = (
        "import sys; from palestra.testing.random_model import make_random_model as m; m(sys.argv[1], seed=7, shards=2)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert digests(tmp_path) == digests(random_model(seed=7, shards=2))


def test_another_seed_gives_other_weights(random_model):
    one, other = (load_file(random_model(seed=seed) / "model.safetensors") for seed in (0, 1))
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_shards_do_not_change_the_weights(random_model):
    whole = load_file(random_model() / "model.safetensors")
    folder = random_model(shards=3)
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    parts = {name: tensor for file in set(files.values()) for name, tensor in load_file(folder / file).items()}
    assert files.keys() == parts.keys() == whole.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_writing_again_leaves_no_shard_behind(tmp_path):
    make_random_model(tmp_path, shards=3)
    make_random_model(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "qwen3_5"])
def test_tokenizer_gives_back_what_it_was_given(random_model, family):
    from transformers import AutoTokenizer

    folder = random_model(family=family)
    tokenizer, raw = AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == raw.encode(text).ids
        assert tokenizer.decode(ids) == text


def test_control_tokens_are_single_and_markup_survives_decoding(random_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(random_model())
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</tool_call>"):
        assert len(tokenizer.encode(token)) == 1
    ids = tokenizer.encode("<think>a</think><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"
    assert tokenizer.eos_token == "<|im_end|>"


def test_unused_rows_pad_a_vocabulary_the_corpus_cannot_fill(random_model):
    folder = random_model(vocab_size=6000)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 6000
    assert 2000 < Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() < 6000


def test_chat_template_renders_roles_tools_and_calls(random_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(random_model())
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    text = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "reasoning_content": "Add.", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "4"},
            {"role": "tool", "content": "four"},
        ],
        tools=[add],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(add)}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nAdd.\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\nfour\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_longer_conversation_begins_with_the_shorter_one(random_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(random_model())
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "reasoning_content": "A greeting.", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
        {"role": "assistant", "content": "Now we stop."},
    ]
    shown = [tokenizer.apply_chat_template(messages[:end], tokenize=False) for end in range(1, 5)]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(shown))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "gpt2"}, "unknown family 'gpt2'; known: qwen3, qwen2, llama, mistral"),
        ({"shape": "huge"}, "unknown shape 'huge'"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"shards": 0}, "shards must be at least 1"),
        ({"shards": 1000}, "1000 shards for"),
        ({"vocab_size": 100}, "vocab_size 100 is too small"),
    ],
)
def test_impossible_wish_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_random_model(tmp_path, **options)


def test_named_shapes_have_their_published_sizes():
    def parameters(name: str) -> float:
        s = SHAPES[name]
        attention = 2 * s.hidden * s.head_dim * (s.heads + s.kv_heads)
        return s.vocab * s.hidden + s.layers * (attention + 3 * s.hidden * s.intermediate)

    assert parameters("qwen3-0.6b") == pytest.approx(0.596e9, rel=0.01)
    assert parameters("qwen3-4b") == pytest.approx(4.02e9, rel=0.01)


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
