"""What a folder or datum can get wrong: one clear message each, which names the file, the field and what would work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.model import (
    DataError,
    ModelError,
    ModelSpec,
    TokenizerError,
    TrainItem,
    UnsupportedModel,
    WeightsError,
    encode,
    load_model,
    load_tokenizer,
)
from palestra.types import Datum


@pytest.fixture
def copy_of(random_model, tmp_path) -> Callable[..., Path]:
    def copy(**options: Any) -> Path:
        return Path(shutil.copytree(random_model(**options), tmp_path / "model"))

    return copy


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in config.items() if v != "remove"}))


def message_of(error: type[ModelError], folder: Path) -> str:
    with pytest.raises(error) as found:
        load_model(folder)
    return str(found.value)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["'architectures'", "'GPT2LMHeadModel'"]),
        ({"architectures": ["Llama4ForCausalLM"]}, ["'architectures'", "'Llama4ForCausalLM'"]),
        ({"architectures": ["KimiLinearForCausalLM"]}, ["'architectures'", "'KimiLinearForCausalLM'"]),
        ({"architectures": ["InklingForCausalLM"]}, ["'architectures'", "'InklingForCausalLM'"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["'architectures'"]),
        ({"architectures": "remove"}, ["'architectures'", "nothing"]),
    ],
)
def test_unsupported_architecture_is_named_with_those_supported(copy_of, fields, parts):
    folder = copy_of()
    edit_config(folder, **fields)
    message = message_of(UnsupportedModel, folder)
    supported = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    for part in (str(folder / "config.json"), supported, *parts):
        assert part in message


@pytest.mark.parametrize(
    ("architecture", "fields", "parts"),
    [
        ("Qwen2_5ForCausalLM", {}, ["the nearest is Qwen"]),
        ("Llama4ForCausalLM", {"attention_chunk_size": 8192}, ["the nearest is", "which lacks chunked attention"]),
    ],
)
def test_unsupported_architecture_names_the_nearest_and_what_it_lacks(copy_of, architecture, fields, parts):
    folder = copy_of()
    edit_config(folder, architectures=[architecture], **fields)
    message = message_of(UnsupportedModel, folder)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "supported: 'silu'"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["'quantization_config'", "not supported", "bfloat16"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["'longrope'", "supported: default, linear, llama3, yarn"]),
        ({"rope_parameters": "remove", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "supported"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["'yarn'", "'factor'"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ["'llama3'", "'low_freq_factor'"]),
        ({"partial_rotary_factor": 0.5}, ["'partial_rotary_factor'", "only 1.0"]),
        ({"num_hidden_layers": "remove"}, ["'num_hidden_layers'", "positive whole number", "None"]),
        ({"hidden_size": "64"}, ["'hidden_size'", "'64'"]),
        ({"vocab_size": -1}, ["'vocab_size'", "-1"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_field_is_named_with_what_is_supported(copy_of, fields, parts):
    folder = copy_of()
    edit_config(folder, **fields)
    message = message_of(UnsupportedModel, folder)
    for part in (str(folder / "config.json"), *parts):
        assert part in message


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"num_experts": 16}, ["'model.layers.0.mlp.experts.8.gate_proj.weight'", "the config asks for it"]),
        ({"num_experts": 4}, ["more experts than the 4"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok (9)", "experts (8)"]),
        ({"moe_intermediate_size": 64}, ["gate_proj", "[48, 64]", "[64, 64]"]),
        ({"mlp_only_layers": [9]}, ["mlp_only_layers ([9])", "2 layers"]),
        ({"num_hidden_layers": 3}, ["model.layers.2."]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_config_of_experts_that_contradicts_the_files_is_told(copy_of, fields, parts):
    folder = copy_of(family="qwen3_moe")
    edit_config(folder, **fields)
    message = message_of(ModelError, folder)
    for part in (str(folder), *parts):
        assert part in message


@pytest.mark.parametrize(
    ("name", "shape", "parts"),
    [
        (f"{EXPERTS}.3.gate_proj.weight", None, ["no tensor named"]),
        (f"{EXPERTS}.7.up_proj.weight", None, ["no tensor named"]),
        (f"{EXPERTS}.2.down_proj.weight", (64, 47), ["[64, 47]", "[64, 48]"]),
        ("model.layers.1.mlp.gate.weight", None, ["no tensor named"]),
        ("model.layers.1.mlp.gate.weight", (7, 64), ["[7, 64]", "[8, 64]"]),
    ],
)
def test_experts_that_are_missing_or_of_another_shape_are_named(copy_of, name, shape, parts):
    folder = copy_of(family="qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if shape is None else {name: torch.zeros(shape)}), folder / "model.safetensors")
    message = message_of(WeightsError, folder)
    for part in (str(folder), name, *parts):
        assert part in message


@pytest.mark.slow  # it starts a process
def test_what_headers_tell_is_told_without_importing_a_compiler(copy_of):
    """Arithmetic on torch's device meta imports it, which takes seconds."""
    folder = copy_of(family="qwen3_5_moe")
    edit_config(folder, num_hidden_layers=3, layer_types="remove")
    check = (
        "import sys, palestra.model as m\n"
        "try: m.load_model(sys.argv[1])\n"
        "except m.WeightsError as e: print(e, 'torch._dynamo' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", check, str(folder)], capture_output=True, text=True, check=True).stdout
    assert "no tensor named" in said
    assert said.endswith("False\n")


def test_missing_config_is_named(copy_of):
    folder = copy_of()
    (folder / "config.json").unlink()
    message = message_of(UnsupportedModel, folder)
    assert str(folder / "config.json") in message
    assert "no such file" in message


@pytest.mark.parametrize("content", [b'{"architectures": [', b"\xff\xfe\x00", b"[]", b'"qwen3"'])
def test_config_that_is_no_json_object_is_named(copy_of, content):
    folder = copy_of()
    (folder / "config.json").write_bytes(content)
    message = message_of(UnsupportedModel, folder)
    assert str(folder / "config.json") in message
    assert "JSON" in message


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_generation_config_that_is_no_json_object_is_named(copy_of, content):
    folder = copy_of()
    (folder / "generation_config.json").write_bytes(content)
    assert str(folder / "generation_config.json") in message_of(UnsupportedModel, folder)


def test_folder_that_does_not_exist_says_how_to_make_one(tmp_path):
    assert f"palestra model random {tmp_path / 'none'}" in message_of(ModelError, tmp_path / "none")


def test_missing_weights_say_what_is_looked_for(copy_of):
    folder = copy_of()
    (folder / "model.safetensors").unlink()
    message = message_of(WeightsError, folder)
    for part in (str(folder), "model.safetensors", "model.safetensors.index.json", "only safetensors"):
        assert part in message


def test_missing_shard_is_named(copy_of):
    folder = copy_of(shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    message = message_of(WeightsError, folder)
    assert str(shard) in message
    assert "missing" in message


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_shard_index_that_is_none_is_named(copy_of, content):
    folder = copy_of(shards=3)
    index = folder / "model.safetensors.index.json"
    index.write_text(content)
    assert str(index) in message_of(WeightsError, folder)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


def test_missing_tensor_is_named(copy_of):
    folder = copy_of()
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    message = message_of(WeightsError, folder)
    assert str(folder) in message
    assert "'model.layers.1.mlp.up_proj.weight'" in message


def test_tensor_of_the_wrong_shape_is_named_with_both_shapes(copy_of):
    folder = copy_of()
    name = "model.layers.0.self_attn.k_proj.weight"
    file = rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(16, 64)}))
    message = message_of(WeightsError, folder)
    for part in (str(file), name, "[16, 64]", "config.json", "[32, 64]"):
        assert part in message


def test_weights_that_are_not_floating_point_are_refused(copy_of):
    folder = copy_of()
    name = "model.layers.0.self_attn.k_proj.weight"
    file = rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(32, 64, dtype=torch.int8)}))
    message = message_of(WeightsError, folder)
    for part in (str(file), name, "int8", "floating-point"):
        assert part in message


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
@pytest.mark.parametrize("shards", [1, 3])
def test_truncated_weights_are_named(copy_of, keep, shards):
    folder = copy_of(shards=shards)
    file = max(folder.glob("model*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    message = message_of(WeightsError, folder)
    assert str(file) in message
    assert "download it again" in message


def test_model_without_a_tokenizer_says_how_to_save_one(copy_of):
    folder = copy_of()
    (folder / "tokenizer.json").unlink()
    model = load_model(folder)  # training from tokens needs none
    for attempt in (lambda: model.tokenizer, lambda: load_tokenizer(folder)):
        with pytest.raises(TokenizerError) as found:
            attempt()
        assert str(folder / "tokenizer.json") in str(found.value)
        assert "save_pretrained" in str(found.value)


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}'])
def test_malformed_tokenizer_is_named(copy_of, content):
    folder = copy_of()
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError) as found:
        load_tokenizer(folder)
    assert str(folder / "tokenizer.json") in str(found.value)
    assert "not a valid tokenizer" in str(found.value)


@pytest.mark.parametrize("dtype", ["float16", "int8", "fp32"])
def test_unsupported_dtype_names_those_supported(micro_model, dtype):
    with pytest.raises(ModelError, match=rf"dtype '{dtype}' is not supported on cpu; supported: float32, bfloat16"):
        load_model(micro_model, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "banana:0"])
def test_unusable_device_is_named(micro_model, device):
    with pytest.raises(ModelError, match=rf"device '{device}' cannot be used here.*palestra doctor"):
        load_model(micro_model, device=device)


def test_auto_is_the_gpu_if_there_is_one(micro_model):
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert load_model(micro_model, device="auto").decoder.device.type == expected


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "has no tokens"),
        ([1, 512], r"model_input: token id 512 is outside the vocabulary of 512"),
        ([-1, 1], r"model_input: token id -1 is outside"),
        ([1] * 4097, "has 4097 tokens, the model's context is 4096"),
    ],
)
def test_datum_the_model_cannot_read_is_refused(bench, tokens, message):
    datum = Datum.of_tokens(tokens, target_tokens=encode(np.zeros(len(tokens), np.int64)))
    with pytest.raises(DataError, match=message):
        bench.trainer.forward([TrainItem(None, datum)])


def test_bad_datum_stops_its_request_before_anything_runs(bench):
    adapter = bench.adapter()
    good = bench.items([adapter], [5, 7])
    bad = TrainItem(adapter, Datum.of_tokens([1, 2], target_tokens=encode(np.array([1, 600]))))
    with pytest.raises(DataError, match="target_tokens: token id 600"):
        bench.trainer.forward_backward([*good, bad])
    assert not adapter.has_gradient
    expected = bench.trainer.forward_backward(good)
    assert [r.loss for r in expected] == [r.loss for r in bench.trainer.forward(good)]


def test_every_message_is_one_sentence_or_two_without_a_traceback(copy_of):
    folder = copy_of()
    edit_config(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModel) as found:
        ModelSpec.from_folder(folder)
    assert found.value.__cause__ is None
    assert "\n" not in str(found.value)
