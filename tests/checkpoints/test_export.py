"""Exports as the libraries take them: no warning, nothing missing, the same words."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.export import export_checkpoint
from palestra.checkpoints.export_check import check_export
from palestra.checkpoints.export_size import model_bytes
from palestra.config.bundled import BUNDLED, EPHEBE
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weight_files import WeightFiles
from palestra.runs.export_form import GgufSettings
from tests.checkpoints.conftest import write_adapter
from tests.checkpoints.gguf_models import with_qwen_words
from tests.model.loading.test_packed_files import write_fp8

SILENT = {
    "tied": {"tie": True},
    "not tied": {"tie": False},
    "not tied, unembedding": {"tie": False, "train_unembed": True},
    "llama": {"family": "llama", "train_unembed": True},
    "hybrid": {"family": "qwen3_5", "train_unembed": True},
    "experts": {"family": "qwen3_moe", "train_unembed": True},
    "gpt-oss": {"family": "gpt_oss", "train_unembed": True},
}


@contextmanager
def in_silence(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Any warning about what is loaded is an error, and nothing is in the logs."""
    caplog.clear()
    names = ("peft", "transformers")
    for name in names:  # transformers keeps its log to itself
        logging.getLogger(name).addHandler(caplog.handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", FutureWarning)  # what these libraries will change in each other
            warnings.simplefilter("ignore", ResourceWarning)  # connections of SDK clients whose tests are over
            yield
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("case", SILENT)
def test_peft_loads_the_adapter_without_a_warning(case, random_model, tmp_path, caplog):
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM

    options = dict(SILENT[case])
    train_unembed = options.pop("train_unembed", False)
    base = random_model(**options)
    write_adapter(base, tmp_path / "adapter", 3, train_unembed=train_unembed)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "peft", base=base)
    with in_silence(caplog):
        assert PeftConfig.from_pretrained(tmp_path / "out").base_model_name_or_path == base.name
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        loaded = PeftModel.from_pretrained(model, str(tmp_path / "out"))
    trained = {name for name, _ in loaded.named_parameters() if ".lora_" in name}
    assert any("lm_head" in name for name in trained) is train_unembed
    found = check_export(tmp_path / "out", "peft", tmp_path / "adapter", base)
    assert (found.is_good, found.warnings) == (True, [])


def test_a_merged_model_is_whole_for_transformers(tmp_path, caplog):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    base = BUNDLED / EPHEBE
    write_adapter(base, tmp_path / "adapter", 3, train_unembed=True)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "merged", base=base)
    with in_silence(caplog):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        settings = GenerationConfig.from_pretrained(tmp_path / "out")
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        said = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert said.shape[1] > prompt["input_ids"].shape[1]
    assert settings.eos_token_id == GenerationConfig.from_pretrained(base).eos_token_id
    assert model.config.tie_word_embeddings is False  # the unembedding was trained, the embedding was not
    names = {file.name for file in (tmp_path / "out").iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names >= needed
    assert "chat_template.jinja" in names or "chat_template" in (tmp_path / "out" / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("folder", [EPHEBE, "ephebe-shell"])
def test_bundled_models_name_the_dtype_of_their_files_and_are_computed_in_float32(folder):
    base = BUNDLED / folder
    with WeightFiles(base) as files:
        stored = {str(files.dtype(name)) for name in files}
    assert stored == {f"torch.{json.loads((base / 'config.json').read_text())['dtype']}"}
    assert ModelSpec.from_folder(base).dtype == "float32"


def test_a_quantised_base_is_exported_as_a_plain_model(random_model, tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    base = write_fp8(random_model(), tmp_path / "base-fp8")
    write_adapter(base, tmp_path / "adapter", 3)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "merged", base=base)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    with in_silence(caplog):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    export_checkpoint(tmp_path / "adapter", tmp_path / "peft", "peft", base=base)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["base_model_name_or_path"] == base.name


PACKED = {
    "fp8": (torch.float8_e4m3fn, "fp8", "modules_to_not_convert", 1 / 16),  # half of a code's last digit
    "nf4": (torch.uint8, "bitsandbytes", "llm_int8_skip_modules", 0.16),  # half of the widest gap between levels
}


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", PACKED)
def test_a_packed_model_is_read_as_it_was_written(form, family, random_model, tmp_path):
    dtype, method, kept, allowed = PACKED[form]
    base = random_model(family=family, shape="tiny", tie=False)
    write_adapter(base, tmp_path / "adapter", 3, scale=0.05)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "merged", base=base, dtype=form)
    export_checkpoint(tmp_path / "adapter", tmp_path / "plain", "merged", base=base)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = next(name for name in stored if name.endswith("down_proj.weight"))
    assert stored[name].dtype == dtype
    assert stored["model.norm.weight"].dtype == stored["lm_head.weight"].dtype == torch.bfloat16
    quantised = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    routers = {n.removesuffix(".weight") for n in stored if n.endswith("mlp.gate.weight")}
    assert quantised["quant_method"] == method
    assert set(quantised[kept]) == {"model.embed_tokens", "lm_head"} | routers
    with WeightFiles(tmp_path / "out") as packed, WeightFiles(tmp_path / "plain") as plain:
        assert set(packed) == set(plain)
        for name in plain:
            written, meant = packed.tensor(name).float(), plain.tensor(name).float()
            assert written.shape == meant.shape == packed.shape(name)
            assert (written - meant).abs().max() <= meant.abs().max() * allowed


@pytest.mark.parametrize("form", PACKED)
def test_transformers_reads_a_packed_model(form, random_model, tmp_path):
    if form == "nf4":
        pytest.importorskip("bitsandbytes")
    base = random_model(shape="tiny", tie=False)
    write_adapter(base, tmp_path / "adapter", 3, scale=0.05)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "merged", base=base, dtype=form)
    found = check_export(tmp_path / "out", "merged", tmp_path / "adapter", base)
    assert found.mean_difference < 0.6 * found.change


def test_experts_in_one_tensor_are_not_written_in_fp8(random_model, tmp_path):
    base = random_model(family="qwen3_5_moe")
    write_adapter(base, tmp_path / "adapter", 3)
    with pytest.raises(CheckpointError, match=r"holds all experts of a layer.* --dtype bfloat16"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "out", "merged", base=base, dtype="fp8")
    assert not (tmp_path / "out").exists()


SIZES = {
    "as stored": ("merged", None, None),
    "float32": ("merged", "float32", None),
    "fp8": ("merged", "fp8", None),
    "nf4": ("merged", "nf4", None),
    "gguf as stored": ("gguf", None, None),
    "gguf q8_0": ("gguf", None, "q8_0"),
    "gguf q4_0": ("gguf", None, "q4_0"),
}


@pytest.mark.parametrize("is_packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_room_that_is_asked_for_is_what_files_take(is_packed, random_model, tmp_path):
    source = random_model(shape="tiny", dtype="bfloat16", tie=True)
    base = with_qwen_words(write_fp8(source, tmp_path / "fp8") if is_packed else source, tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3, train_unembed=True)
    for name, (form, dtype, quant) in SIZES.items():
        out = tmp_path / f"out {name}"
        export_checkpoint(tmp_path / "adapter", out, form, base=base, dtype=dtype, gguf=GgufSettings(quant))
        written = sum(file.stat().st_size for pattern in ("*.safetensors", "*.gguf") for file in out.glob(pattern))
        assert 0.9 * written < model_bytes(base, dtype, quant, is_untied=True) < 1.1 * written, name


def _without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize("form", ["merged", "gguf"])
@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (_without("model.layers.1.self_attn.q_proj.weight"), "model.layers.1.self_attn.q_proj.weight"),
        (_without("model.norm.weight"), "model.norm.weight"),
        (lambda t: {f"strange.{name}": tensor for name, tensor in t.items()}, "model.embed_tokens.weight"),
    ],
)
def test_a_base_that_lacks_a_weight_is_not_exported(form, change, missing, random_model, tmp_path):
    base = with_qwen_words(random_model(), tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", 3)
    save_file(change(load_file(base / "model.safetensors")), base / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"no tensor named '{missing}'"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "out", form, base=base)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def test_an_adapter_that_diverged_is_not_exported(random_model, tmp_path):
    base = random_model()
    write_adapter(base, tmp_path / "adapter", 3, scale=float("nan"))
    with pytest.raises(CheckpointError, match=r"not finite.* export an earlier checkpoint"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "out", "peft", base=base)


def test_numbers_that_float16_cannot_hold_are_not_written(random_model, tmp_path):
    base = random_model()
    write_adapter(base, tmp_path / "adapter", 3, scale=1e4)
    with pytest.raises(CheckpointError, match="float16 cannot hold; choose --dtype bfloat16 or float32"):
        export_checkpoint(tmp_path / "adapter", tmp_path / "out", "merged", base=base, dtype="float16")
    assert not (tmp_path / "out").exists()


def test_what_a_killed_export_left_is_removed_by_the_next(random_model, tmp_path):
    base = random_model()
    write_adapter(base, tmp_path / "adapter", 3)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    left, running = (tmp_path / f".out.{pid}.partial" for pid in (int(gone.stdout), os.getppid()))
    for folder in (left, running):
        (folder / "inside").mkdir(parents=True)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", "merged", base=base)
    assert (left.exists(), running.exists()) == (False, True)
