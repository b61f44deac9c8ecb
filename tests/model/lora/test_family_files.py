"""Adapters and merged folders of families whose files differ from Llama's: fused, wrapped, with multipliers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.model import AdapterPool, UnsupportedModel, export_merged, load_adapter, load_model, save_adapter
from palestra.model.attention.packed import PackedAttention
from palestra.model.lora.linear import LoraPlan
from palestra.model.mixers.packed_recurrence import packed_recurrence

WRAPPER = "Mistral3ForConditionalGeneration"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "family",
    [
        "phi3",
        "granite",
        "deepseek_v3",
        "nemotron_h",
        "gemma4",
        "gemma4_moe",
        *(
            pytest.param(one, marks=slow)
            for one in ("ministral3", "olmo3", "smollm3", "seed_oss", "gemma3", "glm4_moe")
        ),
    ],
)
def test_family_is_saved_read_and_merged(get_bench, tmp_path, in_transformers, family):
    bench = get_bench(family=family, tie=family in ("granite", "smollm3"))
    adapter, tokens = bench.adapter(rank=4), bench.tokens(40)
    save_adapter(adapter, tmp_path / "adapter")
    again = load_adapter(bench.pool, tmp_path / "adapter")
    assert torch.equal(again.row("weights"), adapter.row("weights"))
    export_merged(adapter, bench.model.folder, tmp_path / "merged")
    (ours,) = bench.logits([tokens], [adapter])
    with torch.no_grad():
        theirs = in_transformers(tmp_path / "merged")(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < 1e-3
    assert load_model(tmp_path / "merged").spec.layers == bench.model.spec.layers


def test_fused_projections_are_trained_as_one(get_bench):
    bench = get_bench(family="phi3")
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in bench.weights(bench.adapter())}
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}


@pytest.mark.parametrize("family", ["phi3", "deepseek_v3", "nemotron_h", "gemma4", "gemma4_moe"])
@pytest.mark.parametrize(("weights", "bound"), [("int8", 0.1), ("nf4", 0.6)])
def test_stacked_projections_are_kept_in_few_bits(get_bench, family, weights, bound):
    bench = get_bench(family=family)
    packed = load_model(bench.model.folder, weights=weights)
    tokens = torch.arange(3, 40)
    attend = PackedAttention([len(tokens)], packed.spec.windows, sources=packed.spec.kv_sources)
    recur = packed_recurrence([len(tokens)], packed.spec, "cpu", torch.float32)
    with torch.no_grad():
        hidden = [m.decoder(tokens, torch.arange(37), attend, LoraPlan(), recur) for m in (bench.model, packed)]
    assert 0 < (hidden[0] - hidden[1]).norm() < bound * hidden[0].norm()


@pytest.fixture
def wrapped(random_model, tmp_path) -> Path:
    """Ministral 3 as it is published: in a wrapper, beside a vision tower."""
    inner, folder = random_model("ministral3"), tmp_path / "wrapped"
    folder.mkdir()
    tensors = {f"language_model.{name}": t for name, t in load_file(inner / "model.safetensors").items()}
    tensors["vision_tower.patch_conv.weight"] = torch.ones(2, 2)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((inner / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"architectures": [WRAPPER], "text_config": config}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((inner / name).read_bytes())
    return folder


def test_wrapped_ministral_is_the_text_model_inside(wrapped, random_model, tmp_path):
    inside, outside = load_model(wrapped), load_model(random_model("ministral3"))
    assert (inside.spec.family, inside.spec.layers) == ("ministral3", outside.spec.layers)
    assert torch.equal(inside.decoder.weights.unembedding, outside.decoder.weights.unembedding)
    adapter = AdapterPool(inside.spec).create()
    adapter.row("weights").normal_(std=0.1)
    export_merged(adapter, wrapped, tmp_path / "merged")
    before, after = (load_file(folder / "model.safetensors") for folder in (wrapped, tmp_path / "merged"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert {"language_model.lm_head.weight", "language_model.model.layers.0.self_attn.q_proj.weight"} <= changed
    assert not any(x in name for name in changed for x in ("vision", "norm", "embed"))


def test_wrapper_around_another_text_model_is_refused(wrapped):
    config = json.loads((wrapped / "config.json").read_text())
    config["text_config"]["model_type"] = "qwen2"
    (wrapped / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"a text model of type 'qwen2'; supported: mistral, ministral3"):
        load_model(wrapped)
