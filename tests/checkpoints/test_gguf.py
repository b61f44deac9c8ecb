"""GGUF files say in transformers what the checkpoint says here, to the bit where their form loses nothing."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.export import export_checkpoint
from palestra.checkpoints.export_check import check_export
from palestra.checkpoints.gguf import ADAPTER_FILE, MODEL_FILE, families
from palestra.model.loading.weight_files import WeightFiles
from palestra.runs.export_form import GgufSettings
from tests.checkpoints.conftest import write_adapter
from tests.checkpoints.gguf_models import TEXTS, metadata, with_qwen_words, with_sentencepiece
from tests.model.loading.test_packed_files import write_mxfp4

slow = pytest.mark.slow
FAMILIES = ["llama", pytest.param("mistral", marks=slow), pytest.param("qwen2", marks=slow), "qwen3", "gemma3", "phi3"]


@pytest.mark.parametrize("tie", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_log_probabilities(family, tie, random_model, tmp_path):
    base = with_qwen_words(random_model(family=family, tie=tie), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3, train_unembed=True)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base)
    found = check_export(tmp_path / "out", "gguf", tmp_path / "adapter", base)
    assert (found.is_good, found.warnings) == (True, [])
    assert found.mean_difference < 1e-5 < 0.5 < found.change


@pytest.mark.parametrize("form", [pytest.param("each", marks=slow), "all"])
def test_experts_are_read_whether_files_have_them_apart_or_together(form, random_model, tmp_path):
    options = {"family": "qwen3_moe", "overrides": {"norm_topk_prob": True}}
    base = with_qwen_words(random_model(**options), tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    assert any(name.endswith(".experts.1.up_proj.weight") for name in weights)
    if form == "all":
        save_file(_with_experts_together(weights), base / "model.safetensors")
    write_adapter(base, tmp_path / "adapter", 3, train_unembed=True)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base)
    found = check_export(tmp_path / "out", "gguf", tmp_path / "adapter", base)
    assert found.mean_difference < 1e-5 < 0.5 < found.change


def _with_experts_together(weights):
    together = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for layer in (0, 1):
        head = f"model.layers.{layer}.mlp.experts"
        count = sum(name.startswith(f"{head}.") for name in weights) // 3
        gate, up, down = (
            torch.stack([weights[f"{head}.{n}.{leaf}_proj.weight"] for n in range(count)])
            for leaf in ("gate", "up", "down")
        )
        together |= {f"{head}.gate_up_proj": torch.cat([gate, up], 1), f"{head}.down_proj": down}
    return together


ERRORS = {"f16": 5e-3, "bf16": 0.04, "q8_0": 0.1, "q5_1": 1.0, "q5_0": 1.0, "q4_1": 2.0, "q4_0": 2.0}


@pytest.mark.parametrize("quant", [pytest.param(q, marks=[] if q == "q8_0" else slow) for q in ERRORS])
def test_a_form_of_fewer_bits_is_off_by_its_error_only(quant, random_model, tmp_path):
    base = with_qwen_words(random_model(dtype="bfloat16"), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base, gguf=GgufSettings(quant))
    found = check_export(tmp_path / "out", "gguf", tmp_path / "adapter", base)
    assert 1e-5 < found.mean_difference < ERRORS[quant]


@pytest.mark.parametrize(("stored", "quant"), [("bfloat16", None), ("bfloat16", "f32"), ("float32", "f32")])
def test_weights_that_training_left_alone_keep_their_bits(stored, quant, random_model, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    base = with_qwen_words(random_model(family="llama", dtype=stored, tie=False), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3, train_attn=False, train_mlp=False, train_unembed=True)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base, gguf=GgufSettings(quant))
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file=MODEL_FILE, dtype=torch.float32, config=AutoConfig.from_pretrained(base)
    ).state_dict()
    with WeightFiles(base) as files:
        same = {name for name in files if torch.equal(files.tensor(name).float(), loaded[name])}
        assert same == set(files) - {"lm_head.weight"}
    kinds = {np.dtype(np.float32)} if quant else {np.dtype(np.uint8), np.dtype(np.float32)}
    assert {tensor.data.dtype for tensor in _tensors(tmp_path / "out")} == kinds


def test_experts_in_mxfp4_keep_their_bits_where_training_left_them_alone(random_model, tmp_path):
    from gguf import dequantize

    packed = write_mxfp4(random_model("gpt_oss", shape="tiny"), tmp_path / "packed")
    base = with_qwen_words(packed, tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3, train_mlp=False)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base, gguf=GgufSettings("mxfp4"))
    read = {tensor.name: tensor for tensor in _tensors(tmp_path / "out")}
    assert {t.tensor_type.name for name, t in read.items() if "_exps.weight" in name} == {"MXFP4"}
    assert {t.tensor_type.name for name, t in read.items() if "attn_q.weight" in name} == {"Q8_0"}
    with WeightFiles(base) as files:
        stack = files.tensor("model.layers.1.mlp.experts.gate_up_proj").float().mT
        down = files.tensor("model.layers.1.mlp.experts.down_proj").float().mT
    for name, expected in (("ffn_gate_exps", stack[:, ::2]), ("ffn_up_exps", stack[:, 1::2]), ("ffn_down_exps", down)):
        tensor = read[f"blk.1.{name}.weight"]
        assert np.array_equal(dequantize(tensor.data, tensor.tensor_type), expected.numpy())


def _tensors(folder):
    from gguf import GGUFReader

    return GGUFReader(folder / MODEL_FILE).tensors


def test_an_adapter_file_has_the_bits_of_the_adapter(random_model, tmp_path):
    from gguf import GGUFReader

    base = random_model(family="llama", tie=False)
    write_adapter(base, tmp_path / "adapter", 3, train_unembed=True)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf-adapter", base=base)
    said = metadata(tmp_path / "out" / ADAPTER_FILE)
    assert (said["general.type"], said["adapter.type"], said["adapter.lora.alpha"]) == ("adapter", "lora", 8.0)
    read = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "out" / ADAPTER_FILE).tensors}
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    start = "base_model.model.model.layers.1."
    same = {
        "blk.1.ffn_down.weight.lora_a": f"{start}mlp.down_proj.lora_A.weight",
        "blk.1.attn_k.weight.lora_a": f"{start}self_attn.k_proj.lora_A.weight",
        "output.weight.lora_b": "base_model.model.lm_head.lora_B.weight",
    }
    assert all(np.array_equal(read[name], stored[ours].numpy()) for name, ours in same.items())
    assert len(read) == len(stored)
    rows = stored[f"{start}self_attn.k_proj.lora_B.weight"].unflatten(0, (2, 2, 8)).transpose(1, 2).flatten(0, 2)
    assert np.array_equal(read["blk.1.attn_k.weight.lora_b"], rows.numpy())  # pairs stand beside each other


def test_transformers_reads_the_same_tokenizer_from_the_file(random_model, tmp_path):
    from transformers import AutoTokenizer

    base = with_qwen_words(random_model(vocab_size=600), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base)
    ours = AutoTokenizer.from_pretrained(base)
    read = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file=MODEL_FILE)
    assert [read(text).input_ids for text in TEXTS] == [ours(text).input_ids for text in TEXTS]
    assert (read.chat_template, read.eos_token, read.pad_token) == (ours.chat_template, "<|im_end|>", "<|endoftext|>")
    said = metadata(tmp_path / "out" / MODEL_FILE)
    assert said["tokenizer.ggml.pre"] == "qwen2"
    assert said["tokenizer.ggml.eot_token_id"] == ours.convert_tokens_to_ids("<|endoftext|>")  # ends answers as well
    kinds = dict(zip(said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"], strict=True))
    assert (kinds["<|im_start|>"], kinds["<think>"], kinds["a"]) == (3, 4, 1)
    assert said["tokenizer.ggml.add_bos_token"] is False


def test_transformers_reads_a_sentencepiece_tokenizer_from_the_file(random_model, tmp_path):
    from transformers import AutoTokenizer

    base = with_sentencepiece(random_model(family="gemma3", vocab_size=700), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base)
    ours = AutoTokenizer.from_pretrained(base)
    read = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file=MODEL_FILE)
    expected = [ours(text).input_ids for text in TEXTS]
    assert [read(text, add_special_tokens=False).input_ids for text in TEXTS] == expected
    said = metadata(tmp_path / "out" / MODEL_FILE)
    assert (said["tokenizer.ggml.model"], said["tokenizer.ggml.add_space_prefix"]) == ("llama", False)
    assert [said[f"tokenizer.ggml.{name}_token_id"] for name in ("padding", "eos", "bos", "unknown")] == [0, 1, 2, 3]
    assert said["tokenizer.ggml.token_type"][3:6] == [2, 6, 6]


def test_a_context_ends_where_a_window_would_that_readers_do_not_know(random_model, tmp_path):
    for family, context in (("mistral", 24), ("gemma3", 4096)):
        folder = tmp_path / family
        base = with_qwen_words(random_model(family=family, overrides={"sliding_window": 24}), folder / "base")
        write_adapter(base, folder / "adapter", 3)
        export_checkpoint(folder / "adapter", folder / "out", "gguf", base=base)
        said = metadata(folder / "out" / MODEL_FILE)
        assert said[f"{said['general.architecture']}.context_length"] == context
        assert said.get("gemma3.attention.sliding_window", 24) == 24


def test_what_the_format_has_not_is_refused_with_what_helps(random_model, tmp_path, monkeypatch):
    base = random_model()
    write_adapter(base, tmp_path / "adapter", 3)

    def refusal(base=base, adapter=tmp_path / "adapter", form="gguf", **more):
        with pytest.raises(CheckpointError) as error:
            export_checkpoint(adapter, tmp_path / "out", form, base=base, **more)
        assert not (tmp_path / "out").exists()
        return str(error.value)

    assert "--pre-tokenizer: qwen2" in refusal()
    assert "unknown --pre-tokenizer 'qwen9'" in refusal(gguf=GgufSettings(pre_tokenizer="qwen9"))
    assert "choose --quant" in refusal(dtype="float32")
    assert "mxfp4 is for experts" in refusal(gguf=GgufSettings("mxfp4"))
    assert "are for --as gguf" in refusal(form="merged", gguf=GgufSettings("q8_0"))
    tied = random_model(tie=True)
    write_adapter(tied, tmp_path / "tied", 3, train_unembed=True)
    assert "the unembedding of a tied model" in refusal(tied, tmp_path / "tied", "gguf-adapter")
    for family, reason in (("gemma4_moe", "experts of Gemma 4"), ("deepseek_v3", "trains latent attention")):
        unread = random_model(family=family)
        write_adapter(unread, tmp_path / family, 3)
        assert reason in refusal(unread, tmp_path / family, "gguf-adapter")
    assert "leave --dtype and --quant away" in refusal(form="gguf-adapter", gguf=GgufSettings("q8_0"))
    other = random_model(family="phi3")
    write_adapter(other, tmp_path / "other", 3)
    with monkeypatch.context() as patched:
        patched.delitem(families.FAMILIES, "phi3")
        said = refusal(other, tmp_path / "other")
    assert "Phi3ForCausalLM cannot be written as GGUF; families that can: llama, mistral, ministral3, qwen2," in said
    both = random_model(family="nemotron_h")
    write_adapter(both, tmp_path / "both", 3)
    assert "without its choice of layers with experts" in refusal(both, tmp_path / "both")
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "attention_factor": 1.0}
    scaled = random_model(overrides={"rope_parameters": yarn})
    assert "without its rope settings attention_factor" in refusal(scaled)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'palestra[gguf]'" in refusal()


@pytest.mark.parametrize("family", ["granite", "gpt_oss", "gemma4"])
def test_a_family_that_transformers_does_not_read_is_written_and_not_checked(family, random_model, tmp_path):
    base = with_qwen_words(random_model(family=family), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base)
    said = metadata(tmp_path / "out" / MODEL_FILE)
    assert said.get("granite.logit_scale", 2) > 1
    assert said.get("gpt-oss.attention.sliding_window", 64) == 64
    with pytest.raises(CheckpointError, match="is written, but transformers cannot check it"):
        check_export(tmp_path / "out", "gguf", tmp_path / "adapter", base)


def test_an_adapter_file_cannot_be_checked_in_transformers(random_model, tmp_path):
    base = random_model(tie=False)
    write_adapter(base, tmp_path / "adapter", 3)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf-adapter", base=base)
    with pytest.raises(CheckpointError, match="transformers reads no adapters of GGUF"):
        check_export(tmp_path / "out", "gguf-adapter", tmp_path / "adapter", base)


def test_a_way_to_split_text_can_be_named(random_model, tmp_path):
    base = random_model()
    write_adapter(base, tmp_path / "adapter", 3)
    settings = GgufSettings(pre_tokenizer="qwen2")
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "gguf", base=base, gguf=settings)
    assert metadata(tmp_path / "out" / MODEL_FILE)["tokenizer.ggml.pre"] == "qwen2"


def test_a_head_that_is_tied_by_default_is_untied_when_trained(random_model, tmp_path):
    """Gemma 3's published configs do not say that their embeddings are tied: the family's default does."""
    base = tmp_path / "base"
    base.mkdir()
    for file in random_model(family="gemma3", tie=True).iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    config = json.loads((base / "config.json").read_text())
    del config["tie_word_embeddings"]
    (base / "config.json").write_text(json.dumps(config))
    write_adapter(base, tmp_path / "adapter", 3, train_unembed=True)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "merged", base=base)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert check_export(tmp_path / "out", "merged", tmp_path / "adapter", base).is_good
