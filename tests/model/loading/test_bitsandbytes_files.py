"""Folders that bitsandbytes has packed in four bits: read as it reads them, and refused with what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from palestra.model import load_model
from palestra.model.errors import ModelError
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.quantised.forms import levels
from palestra.model.quantised.packed import dense
from tests.model.loading.test_packed_files import edit_config

BLOCK, NESTED = 64, 256
NAME = "model.layers.1.mlp.down_proj.weight"


def packed(weight: Tensor, *, is_nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight, by what the format says of them, and the numbers that they stand for."""
    table = levels("nf4")
    blocks = weight.float().reshape(-1, BLOCK)
    scales, state = blocks.abs().amax(1), {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(weight.shape)}
    extras: dict[str, Tensor] = {}
    stored = scales
    if is_nested:
        offset = float(scales.mean())
        map8 = torch.linspace(-1, 1, 256)
        factors = torch.stack([part.abs().max() for part in (scales - offset).split(NESTED)])
        relative = (scales - offset) / factors.repeat_interleave(NESTED)[: len(scales)]
        stored = (relative[:, None] - map8).abs().argmin(1).to(torch.uint8)
        scales = map8[stored.long()] * factors.repeat_interleave(NESTED)[: len(scales)] + offset
        extras = {"nested_absmax": factors, "nested_quant_map": map8}
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
    codes = ((blocks / scales[:, None])[..., None] - table).abs().argmin(-1).to(torch.uint8).flatten()
    made = {
        "": (codes[::2] << 4 | codes[1::2]).view(-1, 1),
        ".absmax": stored,
        ".quant_map": table.clone(),
        ".quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8),
    } | {f".{name}": tensor for name, tensor in extras.items()}
    return made, (table[codes.long()].view(-1, BLOCK) * scales[:, None]).view(weight.shape)


def write_folder(source: Path, folder: Path, *, is_nested: bool) -> dict[str, Tensor]:
    """Packs the linear layers of a model; returns what they stand for."""
    shutil.copytree(source, folder)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, meant[name] = packed(tensors.pop(name), is_nested=is_nested)
        tensors |= {f"{name}{ending}": part for ending, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    return meant


@pytest.mark.parametrize("is_nested", [False, True])
def test_weights_are_what_the_format_says(is_nested, random_model, tmp_path):
    source = random_model(shape="tiny")
    meant = write_folder(source, tmp_path / "packed", is_nested=is_nested)
    with WeightFiles(tmp_path / "packed") as files, WeightFiles(source) as plain:
        assert set(files) == set(plain)
        assert all(torch.equal(files.tensor(name), weight) for name, weight in meant.items())
        assert files.dtype(NAME) is None
    kept, wide = (load_model(tmp_path / "packed", weights=form).decoder.weights.layers[1] for form in ("nf4", None))
    assert torch.equal(dense(kept.mlp.down), dense(wide.mlp.down))  # packed again, nothing is lost


def rewrite_state(tensors: dict[str, Tensor], **fields: object) -> None:
    name = f"{NAME}.quant_state.bitsandbytes__nf4"
    state = json.loads(tensors[name].numpy().tobytes()) | fields
    tensors[name] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.fixture(scope="module")
def sound(random_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "packed"
    write_folder(random_model(shape="tiny"), folder, is_nested=False)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{NAME}.quant_state.bitsandbytes__nf4"), "quant_state.bitsandbytes__nf4 is missing"),
        (lambda t: t.update({f"{NAME}.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)}), "be read"),
        (lambda t: t.update({NAME: torch.zeros(8, 1, dtype=torch.uint8)}), "8 bytes in blocks of 64 are no weight of"),
        (lambda t: t.update({NAME: torch.zeros(8, 1)}), "it must have torch.uint8"),
        (lambda t: rewrite_state(t, blocksize=1), "blocks of 1 and shape"),
        (lambda t: rewrite_state(t, shape=[-64, -128]), r"shape \[-64, -128\]"),
        (lambda t: rewrite_state(t, nested_blocksize=0), "nested blocks of 0"),
        (lambda t: rewrite_state(t, nested_blocksize=256), "nested_absmax"),
        (lambda t: t.update({f"{NAME}.absmax": torch.zeros(8)}), "absmax has 8 numbers, and needs"),
        (lambda t: t.update({f"{NAME}.quant_map": torch.zeros(8)}), "quant_map has 8 numbers, and needs 16"),
    ],
)
def test_what_is_broken_is_named(change, said, sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=said) as error:
        load_model(folder)
    assert NAME in str(error.value)


def test_eight_bits_of_bitsandbytes_are_refused(random_model, tmp_path):
    shutil.copytree(random_model(), tmp_path / "packed")
    edit_config(tmp_path / "packed", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(ModelError, match="only weights in 4 bits"):
        load_model(tmp_path / "packed")


@pytest.mark.parametrize("shape", [(96, 128), (7, 31)])
def test_bitsandbytes_reads_the_same_numbers(shape, tmp_path):
    """Where it is installed: its own packing with nested scales, and its own reading."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=BLOCK, compress_statistics=True)
    tensors = {NAME: codes} | {f"{NAME}.{name}": t for name, t in state.as_dict(packed=True).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        found = files.tensor(NAME)
    assert torch.allclose(found, functional.dequantize_4bit(codes, state), rtol=1e-6, atol=1e-7)
