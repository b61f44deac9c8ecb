"""Weights go straight to where they stay: never twice the model in memory, and what headers tell is told at once."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.model import WeightsError, load_model
from palestra.model.loading import progress, quantised_cache, safetensors_file
from palestra.model.loading.safetensors_file import SafetensorsFile
from palestra.model.quantised.packed import PackedWeight
from palestra.testing.random_model import make_random_model

CHILD = """
import resource, sys
from palestra.model import load_model
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
import torch
torch.ones(8, 8) @ torch.ones(8, 8)
before = peak()
model = load_model(sys.argv[1], dtype=sys.argv[2] or None, weights=sys.argv[3] or None)
print(peak() - before)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_read_as_they_were_written(tmp_path, monkeypatch, dtype, stored):
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", 64)  # converted in parts
    safetensors_file._staging.cache_clear()
    tensors = {"a": torch.randn(7, 13).to(stored), "b": torch.tensor(3.0), "c": torch.randn(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors")
    opened = SafetensorsFile(tmp_path / "x.safetensors")
    place = torch.empty(7, 13, dtype=dtype)
    opened.read_into("a", place)
    assert torch.equal(place, tensors["a"].to(dtype))
    assert all(torch.equal(opened.read(name), tensor) for name, tensor in tensors.items())
    opened.close()
    safetensors_file._staging.cache_clear()


def test_what_is_wrong_with_the_last_layer_is_told_before_the_first_is_read(random_model, tmp_path, monkeypatch):
    folder = make_random_model(tmp_path / "model", shards=3)
    file = folder / "model-00003-of-00003.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.zeros(3, 3)
    save_file(tensors, file)
    monkeypatch.setattr(SafetensorsFile, "_fill", lambda *_: pytest.fail("it was read"))
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*\[3, 3\].*config\.json asks for \[512, 64\]"):
        load_model(folder)


def test_long_loads_show_a_bar_with_the_speed(micro_model, monkeypatch, caplog):
    monkeypatch.setattr(progress, "LOG_EVERY_S", -1.0)
    with caplog.at_level(logging.INFO):
        load_model(micro_model)
    lines = [record.getMessage() for record in caplog.records if "loading_weights" in record.getMessage()]
    assert "[#" in lines[-2]
    assert "gb_per_s=" in lines[-2]
    assert "done" in lines[-1]


@pytest.fixture
def cached(monkeypatch, tmp_path) -> Path:
    """Where quantised weights are kept, small models' too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(quantised_cache, "MIN_BYTES", 0)
    return tmp_path / "caches" / "palestra" / "quantised"


def products(folder: Path, name: str) -> list[torch.Tensor]:
    layers = load_model(folder, weights=name).decoder.weights.layers
    found = [weight for layer in layers for weight in (layer.mlp.gate_up, layer.mlp.down)]
    assert all(isinstance(weight, PackedWeight) for weight in found)
    return [weight.dense().clone() for weight in found if isinstance(weight, PackedWeight)]


@pytest.mark.parametrize("name", ["int8", "fp8", "nf4"])
def test_second_start_takes_quantised_weights_from_the_cache(micro_model, cached, caplog, name):
    first = products(micro_model, name)
    with caplog.at_level(logging.INFO):
        second = products(micro_model, name)
    assert f"weights_quantised to={name} from_cache=8" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("damage", ["cut", "byte", "gone", "empty"])
def test_damaged_cache_is_made_again(micro_model, cached, caplog, damage):
    first = products(micro_model, "int8")
    (file, *_) = sorted(cached.rglob("*.safetensors"))
    content = file.read_bytes()
    changed = {"cut": content[:-9], "byte": content[:-9] + b"\x77" + content[-8:], "gone": None, "empty": b""}[damage]
    file.unlink() if changed is None else file.write_bytes(changed)
    with caplog.at_level(logging.INFO):
        second = products(micro_model, "int8")
    assert "from_cache=7" in caplog.text
    assert ("quantised_cache_damaged" in caplog.text) == (damage != "gone")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert file.read_bytes() == content


def test_other_files_of_the_same_name_are_not_taken_from_the_cache(tmp_path, cached):
    folder = make_random_model(tmp_path / "model", seed=0)
    first = products(folder, "int8")
    make_random_model(folder, seed=1)
    assert not torch.equal(first[0], products(folder, "int8")[0])


def test_a_disk_without_room_does_not_stop_the_load(micro_model, cached, caplog):
    cached.parent.mkdir(parents=True)
    cached.write_text("no folder")
    products(micro_model, "int8")
    assert "quantised_cache_not_written" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "weights", "most"),
    [("", "", 1.15), ("float32", "", 1.15), ("", "int8", 0.75)],
    ids=["as stored", "wider", "int8"],
)
def test_peak_memory_is_one_model(tmp_path, dtype, weights, most):
    """A random model of 1.2 GB in bfloat16; what is loaded is as large, twice as large in float32, or about half."""
    folder = make_random_model(tmp_path / "model", shape="qwen3-0.6b", dtype="bfloat16", shards=2)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    grown = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), dtype, weights],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "caches"), "OMP_NUM_THREADS": "1"},
    )
    size = stored * (2 if dtype == "float32" else 1)
    assert int(grown.stdout) < most * size + (96 << 20)
