"""Pictures in the core: what transformers computes, sharing by content, and models that read text only."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from palestra.model import AdapterPool, DataError, Sampler, Trainer, TrainItem, encode, export_merged, load_model
from palestra.model.vision.placed import row_ids
from palestra.types import (
    AdamParams,
    Datum,
    ImageChunk,
    LoraConfig,
    Picture,
    PlacedImage,
    SampleRequest,
    SamplingParams,
    TextChunk,
)


def _load() -> ModuleType:
    """It is a script: the folder of tests is no package."""
    spec = importlib.util.spec_from_file_location("pictures_check", Path(__file__).with_name("pictures_check.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures_check = _load()


@pytest.fixture(scope="module")
def seeing(random_model) -> Any:
    return load_model(random_model("qwen3_vl"))


@pytest.fixture
def pool(seeing) -> AdapterPool:
    return AdapterPool(seeing.spec, dtype=seeing.decoder.dtype, device=seeing.decoder.device)


def drawn(seed: int, height: int = 48, width: int = 64) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Picture.of_pixels(pixels.tobytes(), height, width)


def prompt(*pictures: Picture, max_tokens: int = 4, **fields: Any) -> SampleRequest:
    """Twenty tokens, then each picture with two more behind it."""
    tokens, images = list(range(20)), []
    for picture in pictures:
        images.append(PlacedImage(len(tokens), picture.digest))
        tokens += [504] * (picture.height * picture.width // 256) + [7, 8]
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(), seed=5)
    return SampleRequest(prompt=tuple(tokens), images=tuple(images), pictures=pictures, params=params, **fields)


def datum(picture: Picture, tail: list[int]) -> tuple[Datum, dict[str, Picture]]:
    chunks = (TextChunk(tuple(range(20))), ImageChunk(picture.digest), TextChunk(tuple(tail)))
    n = 20 + picture.height * picture.width // 256
    inputs = {
        "target_tokens": encode(np.array([0] * (n - 1) + tail + [9])),
        "weights": encode(np.array([0.0] * n + [1.0] * len(tail), np.float32)),
    }
    return Datum(chunks=chunks, loss_inputs=inputs), {picture.digest: picture}


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4_moe_vision"])
def test_a_family_is_what_transformers_computes_of_pictures(name):
    verdict, notes = pictures_check.check(name, seed=0)
    assert verdict == "ok", notes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", pictures_check.SEEING)
def test_families_that_see_are_what_transformers_computes(name, seed):
    verdict, notes = pictures_check.check(name, seed=seed)
    assert verdict == "ok", notes


def test_equal_pictures_share_pages_and_others_do_not(seeing, pool):
    sampler, vision = Sampler(seeing.decoder, pool), seeing.decoder.vision
    first, computed = drawn(1), vision.computed
    (alone,) = sampler.generate([prompt(first, num_samples=3)])
    assert alone.cached_prompt_tokens == 0
    (again,) = sampler.generate([prompt(first)])
    assert again.cached_prompt_tokens == 32  # two pages of 16, all of the picture among them
    (other,) = sampler.generate([prompt(drawn(2))])
    assert other.cached_prompt_tokens == 16
    assert again.sequences[0].tokens == alone.sequences[0].tokens != other.sequences[0].tokens
    assert vision.computed == computed + 2


def test_features_that_were_dropped_are_computed_again_to_the_same_tokens(seeing, pool):
    requests = [prompt(drawn(3), drawn(4)), prompt(drawn(5)), prompt(drawn(4))]
    expected = Sampler(seeing.decoder, pool).generate(requests)
    vision = seeing.decoder.vision
    size, vision.size_bytes = vision.size_bytes, 1
    try:
        found = Sampler(seeing.decoder, pool, prefill_tokens=5).generate(requests)
    finally:
        vision.size_bytes = size
    assert [r.sequences[0].tokens for r in found] == [r.sequences[0].tokens for r in expected]


def test_shared_prefixes_with_pictures_change_no_gradient(seeing, pool):
    found = []
    for shares in (True, False):
        trainer = Trainer(seeing.decoder, pool, share_prefixes=shares)
        adapter = pool.create(LoraConfig(rank=2, seed=1))
        picture, other = drawn(6), drawn(7)
        given = [datum(picture, [3, 4]), datum(picture, [3, 5, 6]), datum(other, [3, 4])]
        text = Datum.of_tokens(list(range(30)), target_tokens=encode(np.arange(1, 31)))
        items = [TrainItem(adapter, one, pictures=pictures) for one, pictures in given]
        results = trainer.forward_backward([*items, TrainItem(adapter, text)])
        found.append((np.concatenate([r.logprobs for r in results]), adapter.row("grads").numpy().copy()))
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_pictures_that_look_ahead_share_prefixes_and_are_never_cut(random_model):
    """Gemma 4's: rows of a picture see each other in layers with a window, and chunks of 24 tokens would cut them."""
    model = load_model(random_model("gemma4_moe_vl"))
    own = AdapterPool(model.spec, dtype=model.decoder.dtype, device=model.decoder.device)
    requests = [prompt(drawn(1), drawn(2), num_samples=2), prompt(drawn(1)), prompt(drawn(1), drawn(3))]
    found = [
        Sampler(model.decoder, own, page_size=8, prefill_tokens=tokens).generate(requests) for tokens in (5, 24, 512)
    ]
    small, middle, whole = ([[s.tokens for s in r.sequences] for r in one] for one in found)
    assert small == middle == whole
    sharing = Sampler(model.decoder, own, page_size=8)
    alone = [sharing.generate([request])[0] for request in requests]
    assert [[s.tokens for s in result.sequences] for result in alone] == whole
    assert alone[-1].cached_prompt_tokens == 32  # the first picture among them
    gradients = []
    for shares in (True, False):
        trainer = Trainer(model.decoder, own, share_prefixes=shares)
        adapter = own.create(LoraConfig(rank=2, seed=1))
        given = [datum(drawn(6), [3, 4]), datum(drawn(6), [3, 5, 6]), datum(drawn(7), [3, 4])]
        results = trainer.forward_backward([TrainItem(adapter, one, pictures=pictures) for one, pictures in given])
        gradients.append((np.concatenate([r.logprobs for r in results]), adapter.row("grads").numpy().copy()))
    for one, other in zip(*gradients, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_text_alone_has_the_bits_it_had_without_a_tower(seeing, pool, random_model):
    blind = load_model(random_model("qwen3_vl"), sees=False)
    assert blind.spec == dataclasses.replace(seeing.spec, tower=None)
    text = Datum.of_tokens(list(range(40)), target_tokens=encode(np.arange(1, 41)))
    one, other = (
        Trainer(model.decoder, pool).forward([TrainItem(None, text)])[0].logprobs for model in (seeing, blind)
    )
    assert one.tobytes() == other.tobytes()


def test_models_that_read_text_only_say_so(micro_model, pool):
    model = load_model(micro_model)
    picture = drawn(8)
    given, pictures = datum(picture, [3])
    with pytest.raises(DataError, match="Qwen3ForCausalLM reads text only"):
        Trainer(model.decoder, pool).forward([TrainItem(None, given, pictures=pictures)])
    with pytest.raises(DataError, match="Qwen3ForCausalLM reads text only"):
        Sampler(model.decoder, pool).submit(prompt(picture))


def test_pictures_that_do_not_fit_are_refused(seeing, pool):
    trainer, sampler = Trainer(seeing.decoder, pool), Sampler(seeing.decoder, pool)
    given, pictures = datum(drawn(9), [3])
    with pytest.raises(DataError, match="was not sent with the request"):
        trainer.forward([TrainItem(None, given)])
    weights = encode(np.ones(33, np.float32))
    odd = Datum(chunks=given.chunks, loss_inputs=given.loss_inputs | {"weights": weights})
    with pytest.raises(DataError, match="position 19 predicts a row of a picture"):
        trainer.forward([TrainItem(None, odd, pictures=pictures)])
    with pytest.raises(DataError, match="multiples of 16"):
        sampler.submit(prompt(drawn(9, height=40)))
    late = SampleRequest(prompt=(1, 2), images=(PlacedImage(1, drawn(9).digest),), pictures=(drawn(9),))
    with pytest.raises(DataError, match="overlaps another one or the end of the 2 positions"):
        sampler.submit(late)
    assert not sampler.has_work


def test_ids_of_rows_tell_pictures_apart():
    first, other = drawn(1), drawn(2)
    assert row_ids(first.digest, 12) == row_ids(drawn(1).digest, 12)
    assert not set(row_ids(first.digest, 64)) & set(row_ids(other.digest, 64))
    assert max(row_ids(first.digest, 64)) < -100


@pytest.mark.parametrize("family", ["qwen3_vl_moe", pytest.param("qwen3_5_vl", marks=pytest.mark.slow)])
def test_a_merged_model_sees_as_the_adapter_did(random_model, tmp_path, family):
    base = load_model(random_model(family))
    pool = AdapterPool(base.spec, dtype=base.decoder.dtype, device=base.decoder.device)
    adapter, trainer = pool.create(LoraConfig(rank=2, seed=1)), Trainer(base.decoder, pool)
    given, pictures = datum(drawn(1), [3, 4])
    for _ in range(2):  # B starts as zero
        trainer.forward_backward([TrainItem(adapter, given, pictures=pictures)])
        trainer.optim_step({adapter: AdamParams(learning_rate=0.05)})
    (expected,) = trainer.forward([TrainItem(adapter, given, pictures=pictures)])
    (plain,) = trainer.forward([TrainItem(None, given, pictures=pictures)])
    export_merged(adapter, base.folder, tmp_path / "merged")
    merged = load_model(tmp_path / "merged")
    (found,) = Trainer(merged.decoder, pool).forward([TrainItem(None, given, pictures=pictures)])
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert np.abs(plain.logprobs - expected.logprobs).max() > 0.05


def largest_gap(folder: Path, device: str, dtype: str) -> float:
    """Between log-probabilities as sampled and as trained, with groups, chunks that end inside pictures, and
    preemptions."""
    model = load_model(folder, device=device, dtype=dtype)
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=model.decoder.device)
    adapter = pool.create(LoraConfig(rank=4, seed=1))
    sampler = Sampler(model.decoder, pool, page_size=16, prefill_tokens=24, cache_tokens=208)
    requests = [prompt(drawn(seed), drawn(seed + 1), max_tokens=50, num_samples=3) for seed in (0, 2)]
    items, sampled = [], []
    for request, result in zip(requests, sampler.generate(requests, adapter), strict=True):
        for sequence in result.sequences:
            chunks, at = [], 0
            for image, picture in zip(request.images, request.pictures, strict=True):
                chunks += [TextChunk(request.prompt[at : image.start]), ImageChunk(image.digest)]
                at = image.start + picture.height * picture.width // 256
            chunks.append(TextChunk((*request.prompt[at:], *sequence.tokens[:-1])))
            before = len(request.prompt) - 1
            inputs = {
                "target_tokens": encode(np.array([0] * before + sequence.tokens)),
                "weights": encode(np.array([0.0] * before + [1.0] * len(sequence.tokens), np.float32)),
            }
            given = Datum(chunks=tuple(chunks), loss_inputs=inputs)
            items.append(TrainItem(adapter, given, pictures={p.digest: p for p in request.pictures}))
            sampled.append(np.array(sequence.logprobs, np.float32))
    assert sampler.scheduler.preemptions
    trained = Trainer(model.decoder, pool).forward(items)
    return max(
        float(np.abs(result.logprobs[-len(own) :] - own).max()) for result, own in zip(trained, sampled, strict=True)
    )


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_5_vl", "gemma4_moe_vl"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_vl", "gemma4_vl")),
    ],
)
def test_what_is_sampled_is_what_is_trained(random_model, family):
    assert largest_gap(random_model(family), "cpu", "float32") < 2e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_samples_have_the_trainers_bits(random_model):
    assert largest_gap(random_model("qwen3_vl", shape="tiny", dtype="bfloat16"), "cuda", "bfloat16") == 0.0
