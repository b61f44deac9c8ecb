"""An adapter that PEFT made becomes a checkpoint of a server, which the official Tinker client samples and trains."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from palestra.cli import main
from palestra.config.bundled import BUNDLED, EPHEBE

TOKENS = [5, 99, 1000, 7, 44, 310, 2, 61]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def server(shared_ephebe) -> Any:
    return shared_ephebe()


@pytest.fixture(scope="module")
def client(server) -> tinker.ServiceClient:
    return server.client()


def make_adapter(folder: Path, **options: Any) -> list[float]:
    """Writes an adapter by PEFT, and returns what it says about TOKENS there."""

    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(BUNDLED / EPHEBE, dtype=torch.float32)
    config = LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": ALL, "init_lora_weights": False, **options})
    model = get_peft_model(base, config)
    model.save_pretrained(folder)
    return logprobs(model)


def logprobs(model: Any) -> list[float]:
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        found = model(tokens).logits[0, :-1].log_softmax(-1)
    return found.gather(-1, tokens[0, 1:, None])[:, 0].tolist()


def run_import(*args: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", "import", *map(str, args)])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"use_rslora": True},
        pytest.param({"target_modules": ["q_proj", "v_proj"]}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_adapter_of_peft_is_sampled_and_trained(server, client, tmp_path, options):
    theirs = make_adapter(tmp_path / "my adapter", **options)
    done = run_import(tmp_path / "my adapter", "--server", server.url, "--model", EPHEBE, "--json")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["weights"].endswith("/weights/my-adapter")
    assert (made["base_model"], made["rank"]) == (EPHEBE, 4)

    sampler = client.create_sampling_client(model_path=made["sampler_weights"])
    ours = sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()
    assert ours[1:] == pytest.approx(theirs, abs=1e-3)

    model = client.create_training_client_from_state(made["weights"])
    inputs = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)  # type: ignore[arg-type]
    first = model.forward_backward([datum], "cross_entropy").result()
    assert first.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(theirs, abs=1e-3)
    model.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    second = model.forward_backward([datum], "cross_entropy").result()
    assert second.metrics["loss:sum"] < first.metrics["loss:sum"]


def test_the_base_is_found_by_its_name_and_what_was_uploaded_does_not_stay(server, tmp_path):
    make_adapter(tmp_path / "adapter")
    before = set(addresses(server))
    done = run_import(tmp_path / "adapter", "--server", server.url, "--name", "mine")  # PEFT wrote the folder's path
    assert done.exit_code == 0, done.output
    assert "model.start_from=tinker://" in done.stdout
    new = set(addresses(server)) - before
    assert sorted(one.rpartition("/")[0].rpartition("/")[2] for one in new) == ["sampler_weights", "weights"]
    assert {one.rpartition("/")[2] for one in new} == {"mine"}
    assert not list((server.checkpoints / "uploads").glob("*/*"))


def test_an_adapter_of_the_hub_is_taken_from_the_cache(server, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--org--adapter" / "snapshots" / "abc"
    make_adapter(snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    done = run_import("org/adapter", "--server", server.url)
    assert done.exit_code == 0, done.output
    assert "/weights/adapter" in done.stdout
    refused = run_import("org/other", "--server", server.url)
    assert "palestra model pull org/other" in refused.stderr


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(folder: Path, change: Any) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(dict(change(name, tensor) for name, tensor in load_file(file).items()), file)


def widened(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name, torch.zeros(400, tensor.shape[1]) if ".lora_A." in name else torch.zeros(tensor.shape[0], 400)


REFUSED = {
    "another base": (
        lambda folder: change_config(folder, base_model_name_or_path="org/other-model"),
        "was trained on org/other-model, and .* serves ephebe; if one of these is the same model",
    ),
    "wrong shapes": (
        lambda folder: change_tensors(folder, lambda name, tensor: (name, tensor[..., :-1].contiguous())),
        "does not fit ephebe: .* has shape .*, this model needs",
    ),
    "unknown layers": (
        lambda folder: change_tensors(folder, lambda name, tensor: (name.replace("layers.0.", "layers.9."), tensor)),
        "does not fit ephebe: .* has no place in this model",
    ),
    "unknown modules": (
        lambda folder: change_config(folder, target_modules=["conv"]),
        "target_modules names conv; supported",
    ),
    "another method": (lambda folder: change_config(folder, use_dora=True), "field 'use_dora' is True"),
    "rank too large": (
        lambda folder: (change_config(folder, r=400), change_tensors(folder, widened)),
        r"LoRA rank 400 is outside 1\.\.256",
    ),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is not an adapter of PEFT"),
    "torn weights": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"torn"),
        "not a complete safetensors file",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "adapter"
    make_adapter(folder)
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line_and_leaves_nothing(server, sound, tmp_path, case):
    change, said = REFUSED[case]
    folder = shutil.copytree(sound, tmp_path / "adapter")
    change(folder)
    before = addresses(server)
    refused = run_import(folder, "--server", server.url)
    assert refused.exit_code == 1, refused.output
    assert refused.stderr.count("\n") == 1
    assert re.search(said, refused.stderr), refused.stderr
    assert addresses(server) == before


def test_a_whole_model_and_an_unknown_name_are_told(server, sound):
    assert "is a whole model" in run_import(BUNDLED / EPHEBE, "--server", server.url).stderr
    refused = run_import(sound, "--server", server.url, "--model", "ephebbe")
    assert "does not serve ephebbe; did you mean ephebe?" in refused.stderr


def test_uploads_are_bounded_and_their_owners(server):
    http, upload = server.http(), secrets.token_hex(16)
    place = f"/api/v1/uploads/{upload}/adapter_config.json"
    assert http.put(place, content=b"{}").json() == {"size_bytes": 2}
    assert http.put(place, content=b"{}").json() == {"size_bytes": 2}
    assert http.put(f"{place}?offset=2", content=b" ").json() == {"size_bytes": 3}
    for bad in (f"{place}?offset=9", f"/api/v1/uploads/{upload}/passwd", "/api/v1/uploads/..%2f/adapter_config.json"):
        assert http.put(bad, content=b"x").status_code in (400, 404)
    body = {"upload_id": upload, "base_model": EPHEBE}
    body["lora"] = {"rank": 4, "alpha": 32.0, "train_attn": True, "train_mlp": True, "train_unembed": False}
    assert http.post("/api/v1/import_weights", json=body).status_code == 404  # the weights are missing
    assert http.post("/api/v1/import_weights", json=body | {"base_model": "other"}).status_code == 400


def addresses(server: Any) -> list[str]:
    return [one.tinker_path for one in server.rest().list_user_checkpoints(limit=100).result().checkpoints]
