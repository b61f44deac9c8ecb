"""`palestra model info --plan`: whether a model fits, from its headers alone."""

from __future__ import annotations

import itertools
import json
import math
import struct
from math import prod
from pathlib import Path

import pytest
import torch

from palestra.memory_plan.model_plan import PlanRequest, plan_memory, training_bytes, weight_bytes
from palestra.model import ModelSpec, load_model
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.quantised.forms import FORMS
from palestra.model.quantised.packed import PackedWeight
from palestra.testing import random_model as random_models
from palestra.util.amounts import parse_amount
from tests.cli.test_cli import palestra


def write_hollow(folder: Path, shape: str, family: str = "qwen3") -> Path:
    """A model folder of a published size whose weights are a hole in the file: nothing is written, headers are real."""
    config = random_models.random_config(family, random_models.SHAPES[shape]) | {"dtype": "bfloat16"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, start = {}, 0
    for parameter in random_models.parameters_of(config):
        end = start + 2 * prod(parameter.shape)
        header[parameter.name] = {"dtype": "BF16", "shape": parameter.shape, "data_offsets": [start, end]}
        start = end
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + start)
    return folder


def test_an_8b_model_trains_and_samples_in_16_gb_with_4_bits(tmp_path):
    folder = write_hollow(tmp_path / "8b", "qwen3-8b")
    shown = palestra("model", "info", folder, "--plan", "--memory", "16GB", "--weights", "nf4", "--json")
    plan = json.loads(shown.stdout)["plan"]
    assert plan["fits"]
    assert plan["total_bytes"] <= 16e9
    assert 6e9 < plan["weights_bytes"] < 7e9  # 4.5 bits for 6.9 B weights, 16 for the embeddings
    assert "models.0.weights=nf4" in plan["settings"]
    text = palestra("model", "info", folder, "--plan", "--memory", "16GB").output
    assert "does not fit into 14.9 GiB" in text
    assert "lower --rows or --context" in text


def test_30b_a3b_trains_and_samples_in_40_gb_with_4_bits(tmp_path):
    folder = write_hollow(tmp_path / "30b", "qwen3-30b-a3b", "qwen3_moe")
    shown = palestra("model", "info", folder, "--plan", "--memory", "40GB", "--weights", "nf4", "--json")
    facts = json.loads(shown.stdout)
    assert facts["plan"]["fits"]
    assert facts["active_parameters"] < 0.12 * facts["parameters"]


FAMILIES, NAMES = ("qwen3", "qwen3_5", "qwen3_moe", "gpt_oss"), (None, "int8", "nf4", "mxfp4")
EVERY_DAY = {("qwen3", None), ("qwen3", "nf4"), ("qwen3_moe", "nf4"), ("gpt_oss", "mxfp4")}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*case, marks=[] if case in EVERY_DAY else [pytest.mark.slow])
        for case in itertools.product(FAMILIES, NAMES)
    ],
)
def test_planned_weights_are_those_that_are_loaded(random_model, family, name):
    folder = random_model(family, shape="tiny")
    with WeightFiles(folder) as files:
        planned, scratch = weight_bytes(
            {n: files.shape(n) for n in files}, FORMS[name] if name else None, 4, sees=False
        )
    model = load_model(folder, weights=name)
    weights, total, largest = model.decoder.weights, 0, 0
    found = [weights.embedding, weights.norm]
    for layer in weights.layers:
        for part in (layer, layer.mixer, layer.mlp):
            found += [getattr(part, field) for field in type(part).__dataclass_fields__]
    for weight in found:
        if isinstance(weight, torch.Tensor | PackedWeight):
            total += weight.nbytes
        if isinstance(weight, PackedWeight):
            largest = max(largest, weight.numel() * 4)
    assert planned == pytest.approx(total, rel=0.01)
    assert scratch == largest or (family == "qwen3_5" and scratch <= largest)


def test_more_rows_and_tokens_take_more(tmp_path):
    folder = write_hollow(tmp_path / "4b", "qwen3.5-4b", "qwen3_5")
    spec = ModelSpec.from_folder(folder)
    with WeightFiles(folder) as files:
        one, two = (plan_memory(files, spec, PlanRequest(40 << 30, rows, 1024)) for rows in (4, 8))
        tight = plan_memory(files, spec, PlanRequest(one.total_bytes - 1, 4, 1024))
    assert two.kv_bytes == 2 * one.kv_bytes == 8 * 1024 * (32 << 10)
    assert two.state_bytes == 2 * one.state_bytes > 0
    assert tight.micro_batch_tokens < one.micro_batch_tokens


def test_nothing_is_computed_again_where_all_of_it_fits(tmp_path):
    folder = write_hollow(tmp_path / "4b", "qwen3-4b")
    common = ("model", "info", folder, "--plan", "--rows", 1, "--context", 8192, "--memory")
    for memory, way, said in (
        ("140GB", "false", "keeps its activations"),
        ("24GB", "true", "again in backward passes (checkpointing), at about 0.7 of the speed"),
    ):
        shown = palestra(*common, memory).output
        assert f"models.0.checkpointing={way}" in shown
        assert said in shown
    with WeightFiles(folder) as files:
        plan = plan_memory(files, ModelSpec.from_folder(folder), PlanRequest(140 * 10**9, 1, 8192))
    settings = [one for one in plan.settings if "max_sample_rows" not in one]
    served = palestra("serve", "--model", folder, "--dry-run", "--memory", "140GB", "models.0.device=cuda", *settings)
    assert "again" not in served.output


def test_a_sequence_is_planned_whole_and_its_activations_are_offloaded_where_only_that_fits(tmp_path):
    folder = write_hollow(tmp_path / "8b", "qwen3-8b")
    spec = ModelSpec.from_folder(folder)
    with WeightFiles(folder) as files:
        on_device, beside = (plan_memory(files, spec, PlanRequest(size * 10**9, 1, 32768, "nf4")) for size in (40, 24))
    assert on_device.micro_batch_tokens == beside.micro_batch_tokens == 32768
    assert "models.0.checkpointing=true" in on_device.settings
    assert not on_device.offloaded_bytes
    assert beside.fits
    assert "models.0.checkpointing=offload" in beside.settings
    assert "models.0.micro_batch_tokens=8192" in beside.settings  # a longer sequence is one by itself
    assert beside.offloaded_bytes == 36 * 32768 * 4096 * 2
    text = palestra(
        "model", "info", folder, "--plan", "--memory", "24GB", "--rows", 1, "--context", 32768, "--weights", "nf4"
    )
    assert "in main memory" in text.output


def test_a_sequence_that_no_device_has_room_for_is_divided_among_the_fewest_that_have(tmp_path):
    folder = write_hollow(tmp_path / "8b", "qwen3-8b")
    common = ("model", "info", folder, "--plan", "--context", "40960", "--rows", "1")
    shared = {
        memory: json.loads(palestra(*common, "--memory", memory, "--json").stdout)["plan"]["shared"]
        for memory in ("24GB", "30GB", "31GB", "33GB")
    }
    assert shared["24GB"] == shared["33GB"] == []  # the cache alone is too large; one device has room
    assert shared["31GB"][:2] == ["models.0.gpus=2", "models.0.parallel.context=2"]
    assert shared["30GB"][:2] == ["models.0.gpus=4", "models.0.parallel.context=4"]
    planned = palestra("serve", "--model", folder, "--dry-run", "--memory", "30GB", *shared["30GB"])
    assert planned.exit_code == 0, planned.output
    assert "training 8192 tokens of 32768" in planned.stdout
    assert f"several such devices: {' '.join(shared['30GB'])}" in palestra(*common, "--memory", "30GB").output


def test_states_of_recurrences_count_for_every_chunk_of_a_long_sequence(tmp_path):
    hybrid, plain = (
        ModelSpec.from_folder(write_hollow(tmp_path / shape, shape, family))
        for shape, family in (("qwen3.5-9b", "qwen3_5"), ("qwen3-8b", "qwen3"))
    )
    (net,) = set(hybrid.delta_nets.values())
    states = 131072 // 64 * math.prod(net.state_shape) * 4
    longer = training_bytes(hybrid, 131072, 2) - 131072 * hybrid.n_layers * hybrid.hidden_size * 2
    assert longer > training_bytes(plain, 131072, 2) - 131072 * plain.n_layers * plain.hidden_size * 2 + states


def test_a_plan_for_main_memory_offloads_nothing(tmp_path):
    folder = write_hollow(tmp_path / "8b", "qwen3-8b")
    with WeightFiles(folder) as files:
        plan = plan_memory(files, ModelSpec.from_folder(folder), PlanRequest(24 * 10**9, 1, 32768, "nf4", kind="cpu"))
    assert not plan.offloaded_bytes
    assert not plan.runtime_bytes
    assert not plan.fits


def test_contexts_beyond_the_models_are_not_planned(random_model):
    folder = random_model("qwen3", context=1024)
    assert "KV of 8 x 1024 tokens" in palestra("model", "info", folder, "--plan", "--memory", "16GB").output
    refused = palestra("model", "info", folder, "--plan", "--context", 1025)
    assert refused.exit_code != 0
    assert "--context 1025 is more than the 1024 tokens that the model reads" in refused.output


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GB", 16 * 10**9), ("40GiB", 40 << 30), ("1.5g", 1_500_000_000), ("512", 512), ("2 TB", 2 * 10**12)],
)
def test_amounts_of_memory_are_read(text, size):
    assert parse_amount(text) == size


def test_wrong_amounts_and_forms_are_one_line(micro_model):
    for options, message in (
        (("--memory", "much"), "'much' is not an amount"),
        (("--weights", "int3"), "weights 'int3' are not known; there are: bf16, fp8"),
    ):
        shown = palestra("model", "info", micro_model, "--plan", *options)
        assert shown.exit_code == 2
        assert message in shown.output
        assert shown.output.count("\n") == 1


def test_info_names_mechanisms_and_what_lora_trains(random_model):
    shown = palestra("model", "info", random_model("qwen3_5")).output
    for part in ("gated delta nets", "gated attention", "norms that multiply by 1 + w", "in_proj_q", "lm_head"):
        assert part in shown


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4_vl"])
def test_towers_are_planned_in_the_models_type_where_they_are_read(random_model, family):
    with WeightFiles(random_model(family)) as files:
        shapes = {name: files.shape(name) for name in files}
    blind, sees = (weight_bytes(shapes, FORMS["nf4"], 2, sees=sees)[0] for sees in (False, True))
    tower = [shape for name, shape in shapes.items() if "visual." in name or "vision" in name]
    assert sees - blind == 2 * sum(map(math.prod, tower))
