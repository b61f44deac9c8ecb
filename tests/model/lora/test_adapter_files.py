"""Adapters on disk: the same numbers in PEFT and in a plain Hugging Face model, and a folder is whole or not there."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.model import AdapterError, AdapterPool, export_merged, load_adapter, load_into, load_model, save_adapter
from palestra.types import AdamParams, LoraConfig

CONFIG, WEIGHTS, OPTIMIZER = "adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"
FLAGS = {
    "everything": {},
    "attention": {"train_mlp": False, "train_unembed": False},
    "mlp": {"train_attn": False, "train_unembed": False},
    "unembedding": {"train_attn": False, "train_mlp": False},
}


def logits_of(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def ours(bench, adapter, tokens) -> torch.Tensor:
    return bench.logits([tokens], [adapter])[0]


def same_weights(bench, a, b) -> bool:
    ones, others = bench.weights(a), bench.weights(b)
    return ones.keys() == others.keys() and all(torch.equal(ones[n], others[n]) for n in ones)


# To PEFT and back


@pytest.mark.parametrize(
    ("flags", "tie"),
    [
        *((flags, False) for flags in FLAGS),
        ("everything", True),
        ("unembedding", True),
        pytest.param("attention", True, marks=pytest.mark.slow),
        pytest.param("mlp", True, marks=pytest.mark.slow),
    ],
)
def test_saved_adapter_gives_the_same_logits_in_peft(get_bench, in_peft, tmp_path, flags, tie):
    bench = get_bench(tie=tie)
    adapter = bench.adapter(rank=6, alpha=10.0, **FLAGS[flags])
    save_adapter(adapter, tmp_path / "a", base_model=str(bench.model.folder))
    tokens = bench.tokens(40)
    truth = logits_of(in_peft(bench.model.folder, tmp_path / "a"), tokens)
    assert (ours(bench, adapter, tokens) - truth).abs().max() < 1e-4
    assert (truth - logits_of(bench.reference(), tokens)).abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_saved_adapter_gives_the_same_logits_in_peft_for_each_family(get_bench, in_peft, tmp_path, family):
    bench = get_bench(family)
    adapter = bench.adapter()
    save_adapter(adapter, tmp_path / "a")
    tokens = bench.tokens(40)
    truth = logits_of(in_peft(bench.model.folder, tmp_path / "a"), tokens)
    assert (ours(bench, adapter, tokens) - truth).abs().max() < 1e-4


PEFT_MADE = {
    "q-and-v": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "with-lm-head": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]},
    "lm-head-tied": {"target_modules": ["v_proj", "lm_head"]},
    "mlp": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "one-layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "full-names": {"target_modules": ["model.layers.0.self_attn.k_proj"]},
}


@pytest.mark.parametrize("case", PEFT_MADE)
def test_adapter_made_by_peft_loads_here_with_the_same_logits(get_bench, in_transformers, tmp_path, case):
    import peft

    bench = get_bench(tie=case.endswith("tied"))
    settings = {"r": 5, "lora_alpha": 12, "task_type": "CAUSAL_LM", **PEFT_MADE[case]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of adapters on the embeddings
        theirs = peft.get_peft_model(in_transformers(bench.model.folder), peft.LoraConfig(**settings)).eval()
        generator = torch.Generator().manual_seed(3)
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        theirs.save_pretrained(tmp_path / "a")
    adapter = load_adapter(bench.pool, tmp_path / "a")
    tokens = bench.tokens(40)
    truth = logits_of(theirs, tokens)
    assert (ours(bench, adapter, tokens) - truth).abs().max() < 1e-4
    assert (truth - logits_of(bench.reference(), tokens)).abs().max() > 0.1


def test_adapter_made_by_peft_survives_a_round_trip_through_here(get_bench, in_transformers, in_peft, tmp_path):
    import peft

    bench = get_bench()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_rslora=True)
    theirs = peft.get_peft_model(in_transformers(bench.model.folder), config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    save_adapter(load_adapter(bench.pool, tmp_path / "theirs"), tmp_path / "ours")
    tokens = bench.tokens(30)
    again = logits_of(in_peft(bench.model.folder, tmp_path / "ours"), tokens)
    assert (again - logits_of(theirs, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("flags", FLAGS)
def test_saved_and_loaded_adapter_is_the_same_to_the_bit(bench, tmp_path, flags):
    adapter = bench.adapter(rank=6, alpha=9.5, **FLAGS[flags])
    save_adapter(adapter, tmp_path / "a")
    loaded = load_adapter(bench.pool, tmp_path / "a")
    assert same_weights(bench, adapter, loaded)
    tokens = bench.tokens(20)
    assert np.array_equal(*bench.distributions([tokens, tokens], [adapter, loaded]))


def test_saved_config_is_what_peft_and_the_cookbook_read(bench, tmp_path):
    save_adapter(bench.adapter(rank=6, alpha=10.0), tmp_path / "a", base_model="some/model")
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 6, 10)
    assert config["base_model_name_or_path"] == "some/model"
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [CONFIG, WEIGHTS]


def test_the_same_adapter_is_saved_as_the_same_bytes(bench, tmp_path):
    adapter = bench.adapter()
    for i in range(12):
        save_adapter(adapter, tmp_path / str(i), optimizer=True)
    for file in (CONFIG, WEIGHTS, OPTIMIZER):
        assert len({(tmp_path / str(i) / file).read_bytes() for i in range(12)}) == 1, file


def test_saving_from_bfloat16_keeps_the_float32_weights(get_bench, tmp_path):
    bench = get_bench(dtype="bfloat16")
    adapter = bench.adapter()
    save_adapter(adapter, tmp_path / "a")
    stored = load_file(tmp_path / "a" / WEIGHTS)
    for name, weight in bench.weights(adapter).items():
        assert torch.equal(stored[f"base_model.model.{name}"], weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapter_stored_in_half_precision_loads(bench, tmp_path, dtype):
    adapter = bench.adapter()
    save_adapter(adapter, tmp_path / "a")
    stored = {n: t.to(dtype) for n, t in load_file(tmp_path / "a" / WEIGHTS).items()}
    save_file(stored, tmp_path / "a" / WEIGHTS)
    loaded = bench.weights(load_adapter(bench.pool, tmp_path / "a"))
    assert all(torch.equal(w, stored[f"base_model.model.{n}"].float()) for n, w in loaded.items())


def test_snapshot_can_be_saved(bench, tmp_path):
    adapter = bench.adapter()
    snapshot = bench.pool.snapshot(adapter)
    before = bench.weights(adapter)
    bench.scramble(adapter, seed=5)
    save_adapter(snapshot, tmp_path / "a")
    stored = load_file(tmp_path / "a" / WEIGHTS)
    assert all(torch.equal(stored[f"base_model.model.{n}"], w) for n, w in before.items())


# Going on with training


def test_training_goes_on_bit_for_bit_from_a_saved_optimizer(get_bench, tmp_path):
    bench = get_bench()
    adapter = bench.adapter(noise=0)
    items = bench.items([adapter], [20, 9, 31])
    params = AdamParams(learning_rate=0.01, weight_decay=0.1, grad_clip_norm=3.0)

    def steps(trainer, adapter, n):
        for _ in range(n):
            trainer.forward_backward([type(i)(adapter, i.datum) for i in items])
            assert trainer.optim_step({adapter: params})[adapter].error is None

    steps(bench.trainer, adapter, 3)
    save_adapter(adapter, tmp_path / "a", optimizer=True)
    steps(bench.trainer, adapter, 2)

    elsewhere = get_bench()
    elsewhere.adapter(seed=4)
    resumed = load_adapter(elsewhere.pool, tmp_path / "a", optimizer=True)
    steps(elsewhere.trainer, resumed, 2)
    undisturbed, again = bench.weights(adapter), elsewhere.weights(resumed)
    assert all(torch.equal(undisturbed[n], again[n]) for n in again)
    assert resumed.steps == adapter.steps == 5

    fresh_optimizer = load_adapter(elsewhere.pool, tmp_path / "a")
    steps(elsewhere.trainer, fresh_optimizer, 2)
    assert not same_weights(elsewhere, resumed, fresh_optimizer)


def test_loading_into_an_adapter_replaces_weights_optimizer_and_gradient(bench, tmp_path):
    source, target = bench.adapter(seed=1), bench.adapter(seed=2)
    save_adapter(source, tmp_path / "a")
    bench.trainer.forward_backward(bench.items([target], [20]))
    bench.trainer.optim_step({target: AdamParams()})
    bench.trainer.forward_backward(bench.items([target], [20]))
    snapshot, version = bench.pool.snapshot(target), target.weights_id
    before = bench.weights(target)
    load_into(bench.pool, target, tmp_path / "a")
    assert same_weights(bench, source, target)
    assert (target.steps, target.has_gradient) == (0, False)
    assert target.weights_id != version
    assert all(torch.equal(before[n], w) for n, w in bench.weights(snapshot).items())
    work = bench.items([source], [20])
    for adapter in (source, target):
        bench.trainer.forward_backward([type(i)(adapter, i.datum) for i in work])
        bench.trainer.optim_step({adapter: AdamParams(learning_rate=0.01)})
    assert same_weights(bench, source, target)


# Merged export


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_merged_export_loads_in_transformers_and_equals(get_bench, in_transformers, tmp_path, flags, tie):
    bench = get_bench(tie=tie)
    adapter = bench.adapter(rank=6, alpha=10.0, **FLAGS[flags])
    export_merged(adapter, bench.model.folder, tmp_path / "merged")
    tokens = bench.tokens(40)
    expected = ours(bench, adapter, tokens)
    assert (expected - logits_of(in_transformers(tmp_path / "merged"), tokens)).abs().max() < 2e-4
    assert (expected - logits_of(bench.reference(), tokens)).abs().max() > 0.1


def test_merged_export_loads_here_with_tokenizer_and_template(get_bench, tmp_path):
    bench = get_bench("llama", shards=3, overrides={"attention_bias": True})
    adapter = bench.adapter()
    export_merged(adapter, bench.model.folder, tmp_path / "merged")
    merged = load_model(tmp_path / "merged")
    assert merged.tokenizer.encode("some text").ids == bench.model.tokenizer.encode("some text").ids
    assert merged.spec.eos_token_ids == bench.model.spec.eos_token_ids
    assert (tmp_path / "merged" / "chat_template.jinja").is_file()
    assert not (tmp_path / "merged" / "model.safetensors.index.json").exists()


def test_merged_export_of_a_large_model_is_in_several_files(get_bench, in_transformers, tmp_path):
    bench = get_bench()
    adapter = bench.adapter()
    export_merged(adapter, bench.model.folder, tmp_path / "merged", shard_bytes=200_000)
    assert len(list((tmp_path / "merged").glob("model-*-of-*.safetensors"))) > 2
    tokens = bench.tokens(40)
    assert (ours(bench, adapter, tokens) - logits_of(in_transformers(tmp_path / "merged"), tokens)).abs().max() < 2e-4
    assert load_model(tmp_path / "merged").spec == bench.model.spec


def test_merged_export_keeps_the_dtype_of_the_base(get_bench, in_transformers, tmp_path):
    bench = get_bench(dtype="bfloat16")
    export_merged(bench.adapter(), bench.model.folder, tmp_path / "merged")
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert load_model(tmp_path / "merged").decoder.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("stored", "chosen", "written"),
    [
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", torch.float32, torch.float32),
        ("float32", torch.float16, torch.float16),
    ],
)
def test_merged_config_names_the_dtype_of_the_weights(get_bench, tmp_path, stored, chosen, written):
    """Also of a base whose config names another one, and weights that are kept apart in float32 stay so."""
    bench = get_bench(dtype=stored)
    base = Path(shutil.copytree(bench.model.folder, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    export_merged(bench.adapter(), base, tmp_path / "merged", dtype=chosen)
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    norm = weights.pop("model.norm.weight").dtype
    assert norm == (written if stored == "float32" else torch.float32)
    assert {weight.dtype for weight in weights.values()} == {written}
    named = json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"]
    assert f"torch.{named}" == str(written)


def test_merged_export_of_a_tied_model_that_also_stores_its_head(get_bench, in_transformers, tmp_path):
    """Some published folders are tied by config and still hold lm_head.weight: the adapter's part must survive."""
    bench = get_bench(tie=True)
    base = Path(shutil.copytree(bench.model.folder, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = bench.adapter(rank=6)
    export_merged(adapter, base, tmp_path / "merged")
    tokens = bench.tokens(40)
    for merged in (in_transformers(tmp_path / "merged"), None):
        theirs = logits_of(merged, tokens) if merged else _base_logits(load_model(tmp_path / "merged"), bench, tokens)
        assert (ours(bench, adapter, tokens) - theirs).abs().max() < 2e-4


def _base_logits(model, bench, tokens) -> torch.Tensor:
    return type(bench)(model, bench.reference, bench.pool, bench.trainer).logits([tokens])[0]


# Refusals


@pytest.fixture
def saved(bench, tmp_path) -> Path:
    save_adapter(bench.adapter(rank=4), tmp_path / "saved", optimizer=True)
    return tmp_path / "saved"


def refused(bench, folder: Path, *, optimizer: bool = False) -> str:
    """The message; and nothing may be left of the attempt."""
    pool = AdapterPool(bench.model.spec, max_rank=64)
    with pytest.raises(AdapterError) as found:
        load_adapter(pool, folder, optimizer=optimizer)
    assert pool.size_bytes == 0
    return str(found.value)


def test_existing_folder_is_never_overwritten(bench, saved):
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    for write in (
        lambda: save_adapter(bench.adapter(seed=9), saved),
        lambda: export_merged(bench.adapter(seed=9), bench.model.folder, saved),
    ):
        with pytest.raises(AdapterError, match=rf"{saved} already exists"):
            write()
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before
    assert [p.name for p in saved.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("what", ["rank", "flags", "alpha"])
def test_adapter_of_another_shape_is_refused_and_stays_as_it_was(bench, saved, what):
    other = {"rank": {"rank": 8}, "flags": {"train_mlp": False}, "alpha": {"alpha": 16.0}}[what]
    target = bench.adapter(**{"rank": 4, "seed": 3, **other})
    before = bench.weights(target)
    with pytest.raises(
        AdapterError, match=rf"{saved} holds an adapter of rank 4, alpha 32, train_attn train_mlp train_unembed"
    ):
        load_into(bench.pool, target, saved)
    assert all(torch.equal(before[n], w) for n, w in bench.weights(target).items())


@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_truncated_file_is_named_and_changes_nothing(bench, saved, file, keep):
    whole = (saved / file).read_bytes()
    (saved / file).write_bytes(whole[: int(keep * len(whole))])
    target = bench.adapter(rank=4, seed=3)
    before = bench.weights(target)
    with pytest.raises(AdapterError) as found:
        load_into(bench.pool, target, saved, optimizer=True)
    assert str(saved / file) in str(found.value)
    assert all(torch.equal(before[n], w) for n, w in bench.weights(target).items())
    assert str(saved / file) in refused(bench, saved, optimizer=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("bias", "all"),
        ("modules_to_save", ["embed_tokens"]),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("trainable_token_indices", [1, 2]),
        ("alora_invocation_tokens", [5]),
        ("init_lora_weights", "pissa"),
        ("peft_type", "LOHA"),
    ],
)
def test_peft_setting_that_would_change_the_numbers_is_refused(bench, saved, field, value):
    config = json.loads((saved / CONFIG).read_text()) | {field: value}
    (saved / CONFIG).write_text(json.dumps(config))
    message = refused(bench, saved)
    assert str(saved / CONFIG) in message
    assert repr(field) in message
    assert repr(value) in message


@pytest.mark.parametrize(
    ("field", "value"),
    [("init_lora_weights", True), ("init_lora_weights", "gaussian"), ("use_dora", False), ("bias", "none")],
)
def test_peft_setting_that_changes_nothing_is_accepted(bench, saved, field, value):
    before = (saved / CONFIG).read_text()
    config = json.loads(before) | {field: value}
    (saved / CONFIG).write_text(json.dumps(config))
    loaded = load_adapter(bench.pool, saved)
    (saved / CONFIG).write_text(before)
    assert same_weights(bench, loaded, load_adapter(bench.pool, saved))


@pytest.mark.parametrize("modules", [["embed_tokens"], ["q_proj", "experts"], ".*_proj", []])
def test_unknown_target_modules_are_named_with_those_supported(bench, saved, modules):
    config = json.loads((saved / CONFIG).read_text()) | {"target_modules": modules}
    (saved / CONFIG).write_text(json.dumps(config))
    message = refused(bench, saved)
    for part in (str(saved / CONFIG), "target_modules", "supported: down_proj, fc1_latent_proj", "q_proj"):
        assert part in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"r": "four", "lora_alpha": 1, "target_modules": ["q_proj"]}'])
def test_config_that_is_none_is_named(bench, saved, content):
    (saved / CONFIG).write_text(content)
    assert str(saved / CONFIG) in refused(bench, saved)


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS, OPTIMIZER])
def test_missing_file_is_named(bench, saved, file):
    (saved / file).unlink()
    message = refused(bench, saved, optimizer=True)
    assert str(saved / file) in message
    assert "no such file" in message


@pytest.mark.parametrize("rank", [0, 65])
def test_rank_beyond_the_maximum_is_refused(bench, saved, rank):
    config = json.loads((saved / CONFIG).read_text()) | {"r": rank}
    (saved / CONFIG).write_text(json.dumps(config))
    assert f"rank {rank} is outside 1..64" in refused(bench, saved)


def test_adapter_of_another_model_is_refused(get_bench, tmp_path):
    small, large = get_bench(), get_bench(overrides={"hidden_size": 96})
    save_adapter(large.adapter(), tmp_path / "a")
    message = refused(small, tmp_path / "a")
    for part in (str(tmp_path / "a" / WEIGHTS), "[4, 96]", "[4, 64]"):
        assert part in message
    deep = get_bench(overrides={"num_hidden_layers": 3})
    save_adapter(deep.adapter(), tmp_path / "b")
    assert "model.layers.2" in refused(small, tmp_path / "b")


def test_matrix_without_its_partner_is_refused(bench, saved):
    tensors = load_file(saved / WEIGHTS)
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    save_file(tensors, saved / WEIGHTS)
    assert "model.layers.0.mlp.up_proj" in refused(bench, saved)


def test_optimizer_of_another_size_is_refused(bench, saved):
    tensors = load_file(saved / OPTIMIZER)
    tensors["exp_avg"] = tensors["exp_avg"][:-1].clone()
    save_file(tensors, saved / OPTIMIZER, metadata={"steps": "1"})
    message = refused(bench, saved, optimizer=True)
    assert str(saved / OPTIMIZER) in message
    assert "exp_avg" in message


def test_optimizer_without_its_step_count_is_refused(bench, saved):
    save_file(load_file(saved / OPTIMIZER), saved / OPTIMIZER)
    assert str(saved / OPTIMIZER) in refused(bench, saved, optimizer=True)


def test_failed_save_leaves_nothing_behind(bench, tmp_path):
    target = tmp_path / "deep" / "a"
    base = Path(shutil.copytree(bench.model.folder, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)  # the adapter's product does not fit
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(Exception, match=r"up_proj|size|shape"):
        export_merged(bench.adapter(), base, target)
    assert list(target.parent.iterdir()) == []
    export_merged(bench.adapter(), bench.model.folder, target)  # and the name is still free
    assert load_model(target).spec.vocab_size == bench.vocab


def test_failed_save_of_an_adapter_leaves_nothing_behind(bench, tmp_path):
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with pytest.raises(TypeError):
        save_adapter(bench.adapter(), tmp_path / "deep" / "a", base_model=Unprintable())  # type: ignore[arg-type]
    assert list((tmp_path / "deep").iterdir() if (tmp_path / "deep").exists() else []) == []


def test_default_alpha_is_written_as_peft_reads_it(bench, tmp_path):
    save_adapter(bench.pool.create(LoraConfig(rank=8)), tmp_path / "a")
    assert json.loads((tmp_path / "a" / CONFIG).read_text())["lora_alpha"] == 32
