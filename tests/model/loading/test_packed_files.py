"""FP8 and MXFP4 checkpoints: read as the plain weights they stand for, and refused by their headers where broken."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from palestra.model import ModelSpec, UnsupportedModel, WeightsError, export_merged, load_model
from palestra.model.loading import quantised_cache
from palestra.model.loading.packed_files import E2M1, unpack_fp8, unpack_mxfp4
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.quantised.packed import dense

Tensors = dict[str, Tensor]


def pack_fp8(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-n // block) for n in weight.shape)
    scales = torch.empty(rows, columns)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = weight[i * block : (i + 1) * block, j * block : (j + 1) * block].float()
            scales[i, j] = part.abs().max() / 448
            codes[i * block : (i + 1) * block, j * block : (j + 1) * block] = (part / scales[i, j]).to(codes.dtype)
    return codes, scales


def write_fp8(source: Path, folder: Path, change: Callable[[Tensors], None] = lambda tensors: None) -> Path:
    """The model with its projections in FP8, as DeepSeek's and Qwen's FP8 releases are written."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = pack_fp8(tensors[name])
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    return folder


def edit_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_mxfp4_is_what_the_format_says():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 5, 2), generator=generator, dtype=torch.uint8)
    found = unpack_mxfp4(blocks, scales)
    assert found.shape == (3, 5, 64)
    for e, o, i in [(0, 0, 0), (1, 2, 1), (2, 4, 33), (0, 3, 63), (2, 1, 32)]:
        byte = int(blocks[e, o, i // 32, i % 32 // 2])
        nibble = byte >> 4 if i % 2 else byte & 15
        assert float(found[e, o, i]) == E2M1[nibble] * 2.0 ** (int(scales[e, o, i // 32]) - 127)


def test_mxfp4_is_what_transformers_makes_of_it(monkeypatch, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), generator=generator, dtype=torch.uint8)
    save_file({"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}, tmp_path / "model.safetensors")
    monkeypatch.setattr("palestra.model.loading.packed_files.CHUNK_BYTES", 16 * 7)  # chunks end anywhere
    with WeightFiles(tmp_path) as files:
        assert list(files) == ["experts.down_proj"]
        found = files.tensor("experts.down_proj", (3, 64, 10))
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize("shape", [(128, 256), (200, 300), (64, 64), (2, 130, 128)])
def test_fp8_is_multiplied_by_the_scale_of_its_block(shape):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand([*shape[:-2], *(-(-n // 128) for n in shape[-2:])], generator=generator)
    blocks = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    assert torch.equal(unpack_fp8(codes, scales), codes.float() * blocks)
    assert torch.equal(unpack_fp8(codes, torch.tensor(0.5)), codes.float() * 0.5)


def test_fp8_model_computes_with_the_dequantised_weights(random_model, tmp_path, caplog, in_transformers):
    source = random_model(shape="tiny")
    folder = write_fp8(source, tmp_path / "fp8")
    with caplog.at_level(logging.INFO):
        model = load_model(folder)
    assert "weights_dequantised" in caplog.text
    assert "from=fp8 tensors=28" in caplog.text
    plain = Path(shutil.copytree(source, tmp_path / "plain"))
    with WeightFiles(folder) as files:
        save_file({name: files.tensor(name) for name in files}, plain / "model.safetensors")
    expected = load_model(plain).decoder.weights
    found, last = model.decoder.weights, dense(expected.layers[3].mlp.down)
    assert torch.equal(dense(found.layers[0].mlp.gate_up), dense(expected.layers[0].mlp.gate_up))
    assert torch.equal(dense(found.layers[3].mlp.down), last)
    reference = in_transformers(plain)  # it reads the plain form as we do
    assert torch.equal(reference.model.layers[3].mlp.down_proj.weight, last)


def test_merged_export_of_a_packed_model_is_plain_bfloat16_and_says_so(random_model, tmp_path, caplog, bench):
    folder = write_fp8(bench.model.folder, tmp_path / "fp8")
    adapter = bench.adapter()
    with caplog.at_level(logging.INFO):
        export_merged(adapter, folder, tmp_path / "merged")
    assert "merged_from_packed" in caplog.text
    assert "bfloat16" in caplog.text
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert not [name for name in merged if name.endswith("scale_inv")]
    name = "model.layers.1.mlp.down_proj.weight"
    assert merged[name].dtype == torch.bfloat16
    matrices = bench.weights(adapter)
    change = matrices[name.replace(".weight", ".lora_B.weight")] @ matrices[name.replace(".weight", ".lora_A.weight")]
    with WeightFiles(folder) as files:
        expected = files.tensor(name) + adapter.stack.layout.scale * change
    assert torch.equal(merged[name], expected.to(torch.bfloat16))


def write_mxfp4(source: Path, folder: Path) -> Path:
    """The model with experts in MXFP4, as gpt-oss is published; the codes are drawn anew."""
    shutil.copytree(source, folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        n, inputs, outputs = tensors.pop(name).shape
        shape = (n, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(115, 124, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    return folder


def test_mxfp4_files_stay_as_they_are(random_model, tmp_path, monkeypatch):
    """Their bytes are the codes, in the order of outputs that products want, and nothing is cached beside them."""
    monkeypatch.setattr(quantised_cache, "MIN_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_mxfp4(random_model("gpt_oss", shape="tiny"), tmp_path / "mxfp4")
    kept, plain = (load_model(folder, weights=weights).decoder.weights.layers for weights in ("mxfp4", None))
    files = load_file(folder / "model.safetensors")
    for n, (packed, written_out) in enumerate(zip(kept, plain, strict=True)):
        name = f"model.layers.{n}.mlp.experts"
        assert torch.equal(packed.mlp.down.codes, files[f"{name}.down_proj_blocks"].flatten(-2))
        gate, up = packed.mlp.gate_up.codes.chunk(2, 1)
        assert torch.equal(torch.stack([gate, up], 2).flatten(1, 2), files[f"{name}.gate_up_proj_blocks"].flatten(-2))
        assert torch.equal(dense(packed.mlp.gate_up), written_out.mlp.gate_up)
        assert torch.equal(dense(packed.mlp.down), written_out.mlp.down)
    cached = list((tmp_path / "cache").rglob("*.safetensors"))
    assert len(cached) == 2 * len(kept)  # attention alone: q, k, v together, and o


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop(f"{NAME}_scale_inv"), [NAME, "float8_e4m3fn", "scale_inv", "missing"]),
        (lambda t: t.update({f"{NAME}_scale_inv": torch.ones(3, 1)}), [NAME, "[3, 1]", "[1, 1]", "download it again"]),
        (lambda t: t.pop(NAME), [NAME, "no tensor"]),
        (lambda t: t.update({NAME: torch.zeros(128, 64)}), [NAME, "float32", "scale_inv", "float8_e4m3fn"]),
    ],
    ids=["no scales", "scales of another shape", "only scales", "not in eight bits"],
)
def test_half_written_fp8_is_told_by_the_header(random_model, tmp_path, change, parts):
    folder = write_fp8(random_model(), tmp_path / "fp8", change)
    with pytest.raises(WeightsError) as found:
        load_model(folder)
    assert str(folder) in str(found.value)
    for part in parts:
        assert part in str(found.value)


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({"x_blocks": (2, 4, 2, 16)}, ["'x_scales'", "no tensor"]),
        ({"x_scales": (2, 4, 2)}, ["'x_blocks'", "no tensor"]),
        ({"x_blocks": (2, 4, 2, 16), "x_scales": (2, 4, 3)}, ["'x'", "[2, 4, 3]", "[2, 4, 2]", "download it again"]),
        ({"x_blocks": (2, 4, 32), "x_scales": (2, 4, 1)}, ["'x'", "[2, 4, 32]", "inputs / 32"]),
    ],
)
def test_half_written_mxfp4_is_told_by_the_header(tmp_path, tensors, parts):
    stored = {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files, pytest.raises(WeightsError) as found:
        files.shape("x")
    for part in (str(tmp_path), *parts):
        assert part in str(found.value)


@pytest.mark.parametrize(
    ("quantised", "parts"),
    [
        ({"quant_method": "awq"}, ["'awq'", "mxfp4, fp8, compressed-tensors and bitsandbytes"]),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, ["weight_block_size", "[64, 64]", "[128, 128]"]),
        ("fp8", ["quantization_config"]),
    ],
)
def test_other_packings_are_refused_by_the_config(random_model, tmp_path, quantised, parts):
    folder = Path(shutil.copytree(random_model(), tmp_path / "model"))
    edit_config(folder, quantization_config=quantised)
    with pytest.raises(UnsupportedModel) as found:
        ModelSpec.from_folder(folder)
    for part in parts:
        assert part in str(found.value)
