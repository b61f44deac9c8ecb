"""Checkpoints with experts in four-bit integers, as compressed-tensors packs them and Kimi K2 is published."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from palestra.model import ModelSpec, UnsupportedModel, WeightsError, export_merged, load_model
from palestra.model.loading import quantised_cache
from palestra.model.loading.packed_files import unpack_int4
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.quantised.packed import dense
from tests.model.loading.test_packed_files import edit_config, write_mxfp4

Tensors = dict[str, Tensor]
FIXTURE = Path(__file__).parents[2] / "fixtures" / "pack-quantized.safetensors"
"""Two weights that compressed-tensors 0.20 compressed, and what its decompression makes of them."""
GROUP = 32
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP,
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "observer": "minmax",
    "observer_kwargs": {},
}
SCHEME = {"weights": WEIGHTS, "input_activations": None, "output_activations": None, "targets": ["Linear"]}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": SCHEME},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
}
"""As in Kimi K2's config.json."""
WIDTHS = {"moe_intermediate_size": 96, "n_group": 1, "topk_group": 1}
NAME = "model.layers.1.mlp.experts.3.up_proj.weight"


def pack_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int64).flatten(1) + 8
    words = sum(codes[:, i::8] << (4 * i) for i in range(8))
    assert isinstance(words, Tensor)
    return words.to(torch.uint32).view(torch.int32), scales


def write_int4(source: Path, folder: Path, change: Callable[[Tensors], Any] = lambda tensors: None) -> Path:
    """The model with its routed experts packed, and nothing else."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if ".mlp.experts." in n]:
        weight = tensors.pop(name)
        tensors[f"{name}_packed"], tensors[f"{name}_scale"] = pack_int4(weight)
        tensors[f"{name}_shape"] = torch.tensor(weight.shape)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=CONFIG)
    return folder


@pytest.fixture
def kimi(random_model: Callable[..., Path]) -> Path:
    """Its layout in small; widths are multiples of a group."""
    return random_model("deepseek_v3", overrides=WIDTHS)


@pytest.mark.parametrize("name", ["one", "two"])
def test_it_is_what_compressed_tensors_makes_of_it(name):
    stored = load_file(FIXTURE)
    found = unpack_int4(stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"])
    assert list(found.shape) == stored[f"{name}.weight_shape"].tolist()
    assert torch.equal(found.to(torch.bfloat16), stored[f"{name}.expected"])


def test_a_model_computes_with_the_weights_that_its_files_stand_for(kimi, tmp_path, caplog):
    folder = write_int4(kimi, tmp_path / "int4")
    with caplog.at_level(logging.INFO):
        found = load_model(folder).decoder.weights
    assert "weights_dequantised" in caplog.text
    assert "from=int4 tensors=24" in caplog.text
    plain = Path(shutil.copytree(kimi, tmp_path / "plain"))
    with WeightFiles(folder) as files:
        written = {name: files.tensor(name) for name in files}
    original = load_file(plain / "model.safetensors")
    assert written.keys() == original.keys()
    assert 0 < (written[NAME] - original[NAME]).abs().max() < 0.1 * original[NAME].abs().max()
    save_file(written, plain / "model.safetensors")
    expected = load_model(plain).decoder.weights
    for ours, theirs in zip(found.layers[1:], expected.layers[1:], strict=True):
        assert torch.equal(dense(ours.mlp.gate_up), dense(theirs.mlp.gate_up))
        assert torch.equal(dense(ours.mlp.down), dense(theirs.mlp.down))


def test_files_stay_as_they_are_in_a_model_of_four_bits(kimi, tmp_path, monkeypatch):
    """Their bytes are the codes and their groups the groups: nothing is quantised a second time, or cached."""
    monkeypatch.setattr(quantised_cache, "MIN_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_int4(kimi, tmp_path / "int4")
    kept, plain = (load_model(folder, weights=weights).decoder.weights.layers[1].mlp for weights in ("int4", None))
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts"
    for i in range(len(kept.down.codes)):
        assert torch.equal(kept.down.codes[i], stored[f"{name}.{i}.down_proj.weight_packed"].view(torch.uint8))
        assert torch.equal(kept.down.scales[i], stored[f"{name}.{i}.down_proj.weight_scale"].float())
    assert torch.equal(dense(kept.gate_up), dense(plain.gate_up))
    assert torch.equal(dense(kept.down), dense(plain.down))
    cached = [load_file(file)["codes"].shape for file in (tmp_path / "cache").rglob("*.safetensors")]
    assert cached
    assert all(rows < kept.down.codes.shape[0] * kept.down.codes.shape[1] for rows, _ in cached)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_other_forms_are_read_again_from_the_cache(kimi, random_model, tmp_path, monkeypatch, form):
    """Also where the files are packed in another form, whose tensors have other names than the weights."""
    monkeypatch.setattr(quantised_cache, "MIN_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packed = write_mxfp4(random_model("gpt_oss", shape="tiny"), tmp_path / "mxfp4") if form == "int4" else None
    folder = packed or write_int4(kimi, tmp_path / "int4")
    first, again = (load_model(folder, weights=form).decoder.weights.layers[1].mlp for _ in range(2))
    assert torch.equal(first.down.codes, again.down.codes)
    assert torch.equal(first.gate_up.scales, again.gate_up.scales)


def test_merged_export_is_plain(kimi, tmp_path, get_bench):
    folder = write_int4(kimi, tmp_path / "int4")
    export_merged(get_bench("deepseek_v3", overrides=WIDTHS).adapter(), folder, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == load_file(kimi / "model.safetensors").keys()
    assert merged[NAME].dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop(f"{NAME}_scale"), [f"{NAME}_scale", "no tensor"]),
        (lambda t: t.update({f"{NAME}_scale": torch.ones(96, 3)}), [NAME, "[96, 3]", "[96, 64]", "download it again"]),
        (lambda t: t.update({f"{NAME}_packed": torch.ones(96, 8)}), [f"{NAME}_packed", "float32", "int32"]),
        (lambda t: t.update({f"{NAME}_packed": torch.ones(96, 4, dtype=torch.int32)}), [NAME, "[96, 32]", "[96, 64]"]),
    ],
    ids=["no scales", "scales of another shape", "no integers", "too few weights"],
)
def test_half_written_files_are_told_by_the_header(kimi, tmp_path, change, parts):
    folder = write_int4(kimi, tmp_path / "int4", change)
    with pytest.raises(WeightsError) as found:
        load_model(folder)
    for part in (str(folder), *parts):
        assert part in str(found.value)


def scheme(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": SCHEME | {"weights": WEIGHTS | weights}}}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"format": "float-quantized"}, "format is 'float-quantized'"),
        ({"config_groups": {"group_0": SCHEME | {"format": "nvfp4-pack-quantized"}}}, "'nvfp4-pack-quantized'"),
        (scheme(num_bits=8), "num_bits of group_0 is 8"),
        (scheme(symmetric=False), "symmetric of group_0 is False"),
        (scheme(strategy="channel"), "strategy of group_0 is 'channel'"),
        (scheme(actorder="group"), "actorder of group_0 is 'group'"),
        ({"config_groups": {"group_0": SCHEME | {"input_activations": {"num_bits": 8}}}}, "has input_activations"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "there is a sparsity_config"),
        ({"config_groups": {}}, "config_groups is missing"),
    ],
)
def test_other_schemes_of_compressed_tensors_are_refused_by_name(kimi, tmp_path, change, part):
    folder = Path(shutil.copytree(kimi, tmp_path / "other"))
    edit_config(folder, quantization_config=CONFIG | change)
    with pytest.raises(UnsupportedModel) as found:
        ModelSpec.from_folder(folder)
    for expected in (part, "quantization_config", "pack-quantized", "bfloat16"):
        assert expected in str(found.value)
