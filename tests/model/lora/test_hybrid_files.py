"""Files of models whose checkpoints join what is trained apart, and wrap the text model in another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.model import AdapterError, AdapterPool, export_merged, load_adapter, load_model, save_adapter
from palestra.model.lora.adapter_files import adapter_matrices

PREFIX = "base_model.model."


@pytest.fixture
def hybrid(get_bench):
    return get_bench("qwen3_5")


@pytest.fixture
def wrapped(random_model, tmp_path) -> Path:
    """The same tied model as the hub publishes it: the text model nested, with weights that are not ours to read."""
    source, folder = random_model("qwen3_5", tie=True), tmp_path / "wrapped"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {}}
    outer |= {"tie_word_embeddings": config.pop("tie_word_embeddings"), "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    tensors |= {"model.visual.patch_embed.weight": torch.ones(3), "mtp.norm.weight": torch.ones(64)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def same_weights(a, b) -> bool:
    return torch.equal(a.row("weights"), b.row("weights"))


@pytest.mark.parametrize("form", ["tinker", "peft"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_adapter_is_read_back_from_either_form(hybrid, tmp_path, form, is_tied):
    adapter = hybrid.adapter(rank=4)
    save_adapter(adapter, tmp_path / "a", form=form, is_tied=is_tied)
    assert same_weights(load_adapter(hybrid.pool, tmp_path / "a"), adapter)
    names = set(load_file(tmp_path / "a" / "adapter_model.safetensors"))
    layer, head = f"{PREFIX}model.layers.0.linear_attn", f"{PREFIX}{'model.unembed_tokens' if is_tied else 'lm_head'}"
    parts = ("in_proj_q", "in_proj_k", "in_proj_v") if form == "tinker" else ("in_proj_qkv",)
    expected = {f"{layer}.{part}.lora_A.weight" for part in (*parts, "in_proj_z", "out_proj")}
    assert {name for name in names if name.startswith(layer) and "lora_A" in name} == expected
    assert f"{head}.lora_B.weight" in names


def test_adapter_that_peft_made_of_the_joined_matrix_is_read(hybrid, tmp_path):
    """One A for queries, keys and values: each part gets a copy."""
    adapter = hybrid.adapter(rank=4)
    save_adapter(adapter, tmp_path / "a", form="peft")
    file, config_file = tmp_path / "a" / "adapter_model.safetensors", tmp_path / "a" / "adapter_config.json"
    tensors, config = load_file(file), json.loads(config_file.read_text())
    for name in [name for name in tensors if "in_proj_qkv" in name]:
        whole = tensors[name]
        tensors[name] = torch.randn(4, whole.shape[1]) if "lora_A" in name else torch.randn(whole.shape[0], 4)
    del config["rank_pattern"], config["alpha_pattern"]
    config_file.write_text(json.dumps(config))
    nested = {name.replace(f"{PREFIX}model.", f"{PREFIX}model.language_model."): t for name, t in tensors.items()}
    save_file(nested, file)
    found = adapter_matrices(load_adapter(hybrid.pool, tmp_path / "a"))
    layer = "model.layers.0.linear_attn"
    whole_a, whole_b = (tensors[f"{PREFIX}{layer}.in_proj_qkv.lora_{x}.weight"] for x in "AB")
    parts = [found[f"{layer}.in_proj_{x}.lora_B.weight"] @ found[f"{layer}.in_proj_{x}.lora_A.weight"] for x in "qkv"]
    assert torch.allclose(torch.cat(parts), whole_b @ whole_a, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha_pattern": {}}, "'rank_pattern'"),
        ({"rank_pattern": {"in_proj_qkv": 5}}, "'rank_pattern'"),
        ({"rank_pattern": {"o_proj": 12}, "alpha_pattern": {"o_proj": 24}}, "'rank_pattern'"),
    ],
)
def test_ranks_of_their_own_are_refused(hybrid, tmp_path, change, message):
    save_adapter(hybrid.adapter(rank=4), tmp_path / "a", form="peft")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(AdapterError, match=message):
        load_adapter(hybrid.pool, tmp_path / "a")


def test_joined_matrix_that_is_not_block_diagonal_is_refused(hybrid, tmp_path):
    save_adapter(hybrid.adapter(rank=4), tmp_path / "a", form="peft")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"{PREFIX}model.layers.0.linear_attn.in_proj_qkv.lora_B.weight"][0, -1] = 1.0
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=r"in_proj_qkv\.lora_B\.weight mixes the parts' ranks"):
        load_adapter(hybrid.pool, tmp_path / "a")


def test_mamba_is_read_back_from_either_form(get_bench, tmp_path):
    """In PEFT's form gates and x are rows of one matrix, and those behind them must not change."""
    bench = get_bench("nemotron_h")
    adapter = bench.adapter(rank=4)
    for form in ("tinker", "peft"):
        save_adapter(adapter, tmp_path / form, form=form)
        assert same_weights(load_adapter(bench.pool, tmp_path / form), adapter)
    file, name = tmp_path / "peft" / "adapter_model.safetensors", f"{PREFIX}model.layers.0.mixer.in_proj.lora_B.weight"
    tensors, mamba = load_file(file), bench.model.spec.mambas[0]
    assert tensors[name].shape == (mamba.in_size, 8)
    tensors[name][-1, 0] = 1.0
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=r"changes the last 72 rows, which adapters do not train"):
        load_adapter(bench.pool, tmp_path / "peft")


def test_adapter_of_mixers_alone_trains_no_networks(get_bench, tmp_path):
    bench = get_bench("nemotron_h")
    save_adapter(bench.adapter(rank=4, train_mlp=False, train_unembed=False), tmp_path / "a")
    config = load_adapter(bench.pool, tmp_path / "a").config
    assert (config.train_attn, config.train_mlp) == (True, False)


def test_joined_matrix_has_no_place_in_a_model_without_delta_nets(get_bench, tmp_path):
    save_adapter(get_bench("qwen3_5").adapter(rank=4), tmp_path / "a", form="peft")
    with pytest.raises(AdapterError, match=r"in_proj_qkv.* has no place in this model"):
        load_adapter(get_bench().pool, tmp_path / "a")


def test_merged_export_computes_what_the_adapter_does(hybrid, tmp_path, in_transformers):
    adapter = hybrid.adapter(rank=4)
    export_merged(adapter, hybrid.model.folder, tmp_path / "merged")
    tokens = hybrid.tokens(70)
    (ours,) = hybrid.logits([tokens], [adapter])
    with torch.no_grad():
        theirs = in_transformers(tmp_path / "merged")(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).abs().max() < 1e-3


def test_wrapped_model_is_the_text_model_inside(wrapped, random_model):
    inside, outside = (load_model(folder) for folder in (wrapped, random_model("qwen3_5", tie=True)))
    assert inside.spec.architecture == "Qwen3_5ForConditionalGeneration"
    assert inside.spec.layers == outside.spec.layers
    assert inside.spec.tie_embeddings
    assert torch.equal(inside.decoder.weights.layers[0].mlp.gate_up, outside.decoder.weights.layers[0].mlp.gate_up)
    assert torch.equal(inside.decoder.weights.embedding, outside.decoder.weights.embedding)


def test_merged_export_of_a_wrapped_tied_model_keeps_its_layout_and_unties(wrapped, tmp_path):
    model = load_model(wrapped)
    pool = AdapterPool(model.spec)
    adapter = pool.create()
    adapter.row("weights").normal_(std=0.1)
    export_merged(adapter, wrapped, tmp_path / "merged")
    before, after = (load_file(folder / "model.safetensors") for folder in (wrapped, tmp_path / "merged"))
    assert after.keys() == before.keys() | {"lm_head.weight"}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in changed
    assert not any(x in name for name in changed for x in ("visual", "mtp", "in_proj_a", "in_proj_b", "embed"))
    merged = load_model(tmp_path / "merged")
    assert not merged.spec.tie_embeddings
