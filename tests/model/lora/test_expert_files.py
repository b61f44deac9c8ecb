"""Files of models with experts: Tinker's layout, PEFT's two, and merged folders in the base's own."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from palestra.model import AdapterError, WeightsError, export_merged, load_adapter, load_model, save_adapter
from palestra.model.lora.adapter_files import adapter_matrices
from palestra.types import LoraConfig

EXPERTS = "model.layers.0.mlp.experts"
N, SIZE, HIDDEN, RANK = 8, 48, 64, 4


@pytest.fixture
def moe(get_bench):
    return get_bench("qwen3_moe")


def read(folder) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): t for name, t in tensors.items()}


def rewrite(folder, tensors: dict[str, torch.Tensor], **config) -> None:
    """In place, as another program would have written them."""
    named = {f"base_model.model.{name}": t.contiguous() for name, t in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def logits(bench, adapter) -> torch.Tensor:
    return bench.logits([list(range(3, 40))], [adapter])[0]


def test_tinkers_layout_has_one_outer_matrix_for_all_experts(moe, tmp_path):
    save_adapter(moe.adapter(rank=RANK), tmp_path / "a")
    shapes = {name: list(t.shape) for name, t in read(tmp_path / "a").items() if name.startswith(EXPERTS)}
    assert shapes == {
        f"{EXPERTS}.w1.lora_A.weight": [1, RANK, HIDDEN],
        f"{EXPERTS}.w1.lora_B.weight": [N, SIZE, RANK],
        f"{EXPERTS}.w3.lora_A.weight": [1, RANK, HIDDEN],
        f"{EXPERTS}.w3.lora_B.weight": [N, SIZE, RANK],
        f"{EXPERTS}.w2.lora_A.weight": [N, RANK, SIZE],
        f"{EXPERTS}.w2.lora_B.weight": [1, HIDDEN, RANK],
    }


@pytest.mark.parametrize("form", ["tinker", "peft"])
@pytest.mark.parametrize("per_expert", [False, True])
def test_adapter_is_read_back_from_either_form(moe, tmp_path, form, per_expert):
    adapter = moe.adapter(rank=RANK, per_expert=per_expert)
    save_adapter(adapter, tmp_path / "a", form=form)
    found = load_adapter(moe.pool, tmp_path / "a")
    assert found.config.per_expert == per_expert
    assert torch.equal(found.row("weights"), adapter.row("weights"))


@pytest.mark.parametrize("form", ["tinker", "peft"])
def test_interleaved_experts_are_read_back_from_either_form(get_bench, tmp_path, form):
    oss = get_bench("gpt_oss")
    adapter = oss.adapter(rank=RANK)
    save_adapter(adapter, tmp_path / "a", form=form)
    assert torch.equal(load_adapter(oss.pool, tmp_path / "a").row("weights"), adapter.row("weights"))


def test_merged_folder_has_interleaved_experts_as_the_base(get_bench, in_transformers, tmp_path):
    oss = get_bench("gpt_oss")
    adapter = oss.adapter(rank=RANK)
    export_merged(adapter, oss.model.folder, tmp_path / "merged")
    with torch.no_grad():
        truth = in_transformers(tmp_path / "merged")(torch.tensor([list(range(3, 40))])).logits[0]
    assert (logits(oss, adapter) - truth).abs().max() < 1e-3


@pytest.mark.parametrize("per_expert", [False, True])
def test_peft_computes_what_the_adapter_does(moe, tmp_path, per_expert):
    adapter = moe.adapter(rank=RANK, per_expert=per_expert)
    theirs = moe.peft(adapter, tmp_path / "a")
    with torch.no_grad():
        truth = theirs(torch.tensor([list(range(3, 40))])).logits[0]
    assert (logits(moe, adapter) - truth).abs().max() < 1e-3


def test_adapter_that_peft_made_of_the_stacked_parameters_is_read(moe, tmp_path):
    """One A for gate and up of an expert: both get a copy. Without our mark, nothing says that experts share."""
    import peft

    config = peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    config.target_parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    from transformers import AutoModelForCausalLM

    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(moe.model.folder), config)
    model.save_pretrained(tmp_path / "a")
    adapter = load_adapter(moe.pool, tmp_path / "a")
    assert adapter.config.per_expert
    with torch.no_grad():
        truth = model(torch.tensor([list(range(3, 40))])).logits[0]
    assert (logits(moe, adapter) - truth).abs().max() < 1e-3


def test_matrices_of_single_experts_are_read(moe, tmp_path):
    adapter = moe.adapter(rank=RANK, per_expert=True)
    save_adapter(adapter, tmp_path / "a")
    singles = {}
    for name, tensor in read(tmp_path / "a").items():
        if ".experts." not in name:
            singles[name] = tensor
            continue
        head, _, rest = name.partition(".experts.")
        leaf, kind = rest.split(".", 1)
        part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}[leaf]
        singles |= {f"{head}.experts.{e}.{part}.{kind}": t for e, t in enumerate(tensor)}
    rewrite(tmp_path / "a", singles, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj", "lm_head"])
    assert torch.equal(load_adapter(moe.pool, tmp_path / "a").row("weights"), adapter.row("weights"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}.w2.lora_B.weight"), "w2 has only one of lora_A and lora_B"),
        (lambda t: t.update({f"{EXPERTS}.w1.lora_B.weight": torch.ones(N - 1, SIZE, RANK)}), "this model needs"),
        (lambda t: t.update({f"{EXPERTS}.9.up_proj.lora_A.weight": torch.ones(RANK, HIDDEN)}), "has 8 experts"),
    ],
)
def test_file_that_does_not_fit_is_refused(moe, tmp_path, change, message):
    save_adapter(moe.adapter(rank=RANK), tmp_path / "a")
    tensors = read(tmp_path / "a")
    for name in [name for name in tensors if "w3" in name]:
        del tensors[name]
    change(tensors)
    rewrite(tmp_path / "a", tensors)
    with pytest.raises(AdapterError, match=message):
        load_adapter(moe.pool, tmp_path / "a")


@pytest.mark.parametrize("is_fused", [False, True])
def test_merged_export_keeps_the_layout_and_computes_what_the_adapter_does(moe, tmp_path, in_transformers, is_fused):
    folder, adapter = moe.model.folder, moe.adapter(rank=RANK)
    if is_fused:
        folder = fuse(folder, tmp_path / "fused")
    export_merged(adapter, folder, tmp_path / "merged")
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "merged"))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    with torch.no_grad():
        truth = in_transformers(tmp_path / "merged")(torch.tensor([list(range(3, 40))])).logits[0]
    assert (logits(moe, adapter) - truth).abs().max() < 1e-3


def fuse(source, folder):
    """Two matrices for all experts of a layer, as newer checkpoints have them."""
    folder.mkdir()
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for layer in range(2):
        head = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{head}.{e}.{part}_proj.weight") for e in range(N)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{head}.gate_up_proj": torch.cat([gate, up], 1), f"{head}.down_proj": down}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}.5.up_proj.weight"), r"no tensor named '.*experts\.5\.up_proj\.weight'"),
        (
            lambda t: t.update({f"{EXPERTS}.5.up_proj.weight": torch.ones(3, 4)}),
            r"experts\.5\.up_proj.*has shape \[3, 4\]",
        ),
        (lambda t: t.update({f"{EXPERTS}.8.down_proj.weight": torch.ones(64, 48)}), "more experts than the 8"),
        (lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.ones(4, 64)}), r"asks for \[8, 64\]"),
    ],
)
def test_checkpoint_that_does_not_fit_its_config_is_refused(moe, tmp_path, change, message):
    for file in moe.model.folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(moe.model.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        load_model(tmp_path)


def test_large_adapters_never_move(moe, monkeypatch):
    """One that comes or goes copies none of the others."""
    monkeypatch.setattr("palestra.model.lora.adapters.LARGE_ROW", 1)
    first = moe.pool.create(LoraConfig(rank=RANK))
    place = first.row("weights").data_ptr()
    others = [moe.pool.create(LoraConfig(rank=RANK)) for _ in range(3)]
    assert first.row("weights").data_ptr() == place
    assert len({id(a.stack) for a in (first, *others)}) == 4
    for other in others:
        moe.pool.free(other)
    assert moe.pool.size_bytes == first.row("weights").nbytes
    assert adapter_matrices(first)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_hybrid_models_with_experts_are_saved_read_and_merged(get_bench, tmp_path, in_transformers, family):
    bench = get_bench(family)
    adapter = bench.adapter(rank=RANK)
    for form in ("tinker", "peft"):
        save_adapter(adapter, tmp_path / form, form=form)
        assert torch.equal(load_adapter(bench.pool, tmp_path / form).row("weights"), adapter.row("weights"))
    assert "model.layers.0.mlp.shared_expert.up_proj.lora_A.weight" in read(tmp_path / "tinker")
    export_merged(adapter, bench.model.folder, tmp_path / "merged")
    with torch.no_grad():
        truth = in_transformers(tmp_path / "merged")(torch.tensor([list(range(3, 40))])).logits[0]
    assert (logits(bench, adapter) - truth).abs().max() < 1e-3
