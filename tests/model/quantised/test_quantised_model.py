"""A model whose weights are kept in 8 or 4 bits: the sampler and the trainer compute with the same written-out numbers,
as a plain model of those numbers would."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.model import AdapterPool, Model, ModelError, Trainer, load_model
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.loading.weights import MlpWeights
from palestra.model.quantised.forms import FORM_NAMES, FORMS, FormName
from palestra.model.quantised.packed import PackedWeight, Scratch
from tests.model.conftest import Bench
from tests.model.loading.test_packed_files import write_fp8

PRODUCTS = (
    *("_proj.weight", "_with_mqa.weight", "in_proj_qkv.weight", "in_proj_z.weight"),
    *("experts.gate_up_proj", "experts.down_proj"),
    *("per_layer_input_gate.weight", "per_layer_projection.weight"),
)
PLAIN = "kv_b_proj.weight"


def bench_of(model: Model) -> Bench:
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, max_rank=64)
    return Bench(model, lambda: None, pool, Trainer(model.decoder, pool))


def write_rounded(source: Path, folder: Path, name: FormName) -> Path:
    """The model with its products rounded to what the form can say, as plain weights."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for key, weight in tensors.items():
        if key.endswith(PRODUCTS) and not key.endswith(PLAIN) and FORMS[name].fits(weight.shape[-1]):
            tensors[key] = PackedWeight.of(weight, FORMS[name], torch.float32, Scratch()).dense()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen3", name) for name in FORM_NAMES),
        *(("qwen3_moe", "int8"), ("nemotron_h", "int4"), ("gemma4_moe", "nf4"), ("deepseek_v3", "fp8")),
        *(
            pytest.param(family, name, marks=pytest.mark.slow)
            for family, name in (("qwen3_5", "int8"), ("qwen3_moe", "nf4"), ("gemma4", "int8"))
        ),
    ],
)
def test_it_computes_what_a_plain_model_of_the_same_numbers_computes(random_model, tmp_path, family, name):
    source = random_model(family)
    packed = bench_of(load_model(source, weights=name))
    plain = bench_of(load_model(write_rounded(source, tmp_path / "rounded", name)))
    assert packed.model.weights == name
    gradients, drawn, losses = [], [], []
    for bench in (packed, plain):
        adapter = bench.adapter()
        items = bench.items([adapter], [9, 30])
        losses.append([r.loss for r in bench.trainer.forward_backward(items)])
        gradients.append(bench.gradient(adapter))
        sampler = bench.sampler()
        sampler.submit(bench.request([1, 2, 3, 4], 3), adapter)
        (result,) = bench.run_to_end(sampler).values()
        drawn.append([(s.tokens, list(s.logprobs)) for s in result.sequences])
    assert losses[0] == losses[1]
    assert drawn[0] == drawn[1]
    assert all(torch.equal(gradients[0][key], gradients[1][key]) for key in gradients[0])


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_sampler_and_trainer_agree_as_without_quantising(random_model, name):
    bench = bench_of(load_model(random_model(), weights=name))
    adapter, prompt = bench.adapter(), [5, 6, 7]
    sampler = bench.sampler()
    sampler.submit(bench.request(prompt, 2, max_tokens=20), adapter)
    (result,) = bench.run_to_end(sampler).values()
    for sample in result.sequences:
        expected = bench.logprobs(adapter, [*prompt, *sample.tokens])[len(prompt) - 1 :]
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)


def test_fp8_files_stay_as_they_are(random_model, tmp_path):
    """Not quantised a second time: the numbers are those of the files."""
    folder = write_fp8(random_model(shape="tiny"), tmp_path / "fp8")
    weights = load_model(folder, weights="fp8").decoder.weights.layers[2].mlp
    plain = load_model(folder).decoder.weights.layers[2].mlp
    for name in ("gate_up", "down"):
        packed, expected = getattr(weights, name), getattr(plain, name)
        assert isinstance(packed, PackedWeight)
        assert torch.equal(packed.dense(), expected)
    with WeightFiles(folder) as files:
        stored = files.tensor("model.layers.2.mlp.down_proj.weight")
    assert isinstance(weights.down, PackedWeight)
    assert torch.equal(weights.down.dense(), stored)


def test_memory_is_what_the_form_promises(random_model):
    plain, packed = (load_model(random_model(shape="tiny"), weights=name).decoder.weights for name in (None, "nf4"))
    for layer, small in zip((x.mlp for x in plain.layers), (x.mlp for x in packed.layers), strict=True):
        assert isinstance(small.gate_up, PackedWeight)
        assert small.gate_up.nbytes == FORMS["nf4"].size_bytes(*small.gate_up.shape)
        assert small.gate_up.nbytes < 0.15 * layer.gate_up.nbytes  # 4.5 bits instead of 32
    assert torch.equal(plain.embedding, packed.embedding)


def test_a_weight_that_does_not_divide_into_groups_stays_plain(random_model):
    folder = random_model(overrides={"intermediate_size": 120})
    layer = load_model(folder, weights="int4").decoder.weights.layers[0].mlp
    assert isinstance(layer, MlpWeights)
    assert isinstance(layer.gate_up, PackedWeight)
    assert isinstance(layer.down, torch.Tensor)


def test_unknown_forms_name_those_there_are(micro_model):
    with pytest.raises(ModelError, match="weights 'int3' are not known; there are: bf16, fp8, int8, int4, nf4, mxfp4"):
        load_model(micro_model, weights="int3")
    with pytest.raises(ModelError, match="weights 'bf16' contradict dtype 'float32'"):
        load_model(micro_model, weights="bf16", dtype="float32")
    model = load_model(micro_model, weights="bf16")
    assert (model.weights, model.decoder.dtype) == (None, torch.bfloat16)
