"""Checkpoints of a run's own server, exported as the libraries that load them want them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from palestra.checkpoints import CheckpointError, find_checkpoint, list_checkpoints
from palestra.checkpoints.export import base_of, export_checkpoint, portable_name
from palestra.checkpoints.export_check import check_export
from palestra.cli import main
from tests.checkpoints.conftest import write_adapter


def palestra(*args: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, args)])


def test_checkpoints_are_listed_and_chosen(run):
    found = list_checkpoints(run)
    assert [one.step for one in found] == [2, 4, 6]
    assert find_checkpoint(run, "best") == found[1]
    assert find_checkpoint(run, "2") == found[0]
    last = find_checkpoint(run)
    assert (last, last.folder and last.folder.name) == (found[2], "step_000006@10")
    with pytest.raises(CheckpointError, match="no checkpoint '3'; it has last, best and the steps 2, 4, 6"):
        find_checkpoint(run, "3")


def test_commands_show_them(run):
    shown = palestra("list", "first", "--runs", run.path.parent)
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:]] == ["first@6", "first@4", "first@2"]
    listed = json.loads(palestra("list", run.path, "--json").stdout)
    assert [one["scores"]["eval/success"] for one in listed] == [0.5, 0.75, 0.25]
    assert json.loads(palestra("show", f"{run.path}@best", "--json").stdout)["step"] == 4
    assert palestra("show", f"{run.path}@3").exit_code == 3
    assert palestra("list").exit_code == 2


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_exports_say_in_transformers_what_the_checkpoint_says(run, tmp_path, form):
    done = palestra("export", f"{run.path}@best", tmp_path / "out", "--as", form, "--check", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["check"]["largest_difference"] < 1e-3 < 0.1 < result["check"]["change"]
    assert result["check"]["warnings"] == []
    assert done.stderr == "", "no bars of other libraries"


@pytest.mark.parametrize("form", ["peft", "merged"])
@pytest.mark.parametrize("train_unembed", [False, True], ids=["layers", "unembedding"])
def test_tied_models_are_exported(random_model, tmp_path, form, train_unembed):
    base = random_model(tie=True)
    write_adapter(base, tmp_path / "adapter", 3, train_unembed=train_unembed)
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", form, base=base)
    found = check_export(tmp_path / "out", form, tmp_path / "adapter", base)
    assert found.largest_difference < 1e-3 < 0.1 < found.change
    if form == "peft" and train_unembed:  # PEFT warns whatever the file says; the numbers above are right
        assert ["tie_word_embeddings" in said for said in found.warnings] == [True]
    else:
        assert found.warnings == []


def test_adapter_names_its_base_as_other_machines_know_it(run, tmp_path, micro_model):
    exported = tmp_path / "out"
    assert palestra("export", run.path, exported).exit_code == 0
    assert json.loads((exported / "adapter_config.json").read_text())["base_model_name_or_path"] == micro_model.name
    assert not (exported / "optimizer.safetensors").exists()
    named = tmp_path / "named"
    assert palestra("export", run.path, named, "--base-name", "org/name").exit_code == 0
    assert json.loads((named / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/name"
    cached = Path("/cache/models--Qwen--Qwen3-8B/snapshots/abc")
    assert portable_name(cached) == "Qwen/Qwen3-8B"


def test_a_folder_that_cannot_be_written_is_a_sentence(run, tmp_path):
    (tmp_path / "file").touch()
    for place, said in ((tmp_path / "file" / "out", "exists, and is in the way"), ("/proc/out", "0 B are free")):
        refused = palestra("export", run.path, place)
        assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1), refused.output
        assert said in refused.stderr
        assert "0.00" not in refused.stderr
        assert "Errno" not in refused.stderr


def test_a_whole_model_is_written_in_the_dtype_that_was_chosen(run, tmp_path):
    assert palestra("export", run.path, tmp_path / "half", "--as", "merged", "--dtype", "bfloat16").exit_code == 0
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    refused = palestra("export", run.path, tmp_path / "adapter", "--dtype", "bfloat16")
    assert refused.exit_code == 1
    assert "only for a whole model" in refused.stderr


def test_what_cannot_be_exported_is_said_in_one_line(run, tmp_path, micro_model):
    adapter = find_checkpoint(run).folder
    assert adapter is not None
    lost = shutil.copytree(adapter, tmp_path / "lost")
    config = json.loads((lost / "adapter_config.json").read_text())
    (lost / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/nowhere/model"}))
    with pytest.raises(CheckpointError, match="trained on /nowhere/model, which is not here; give it with --base"):
        base_of(lost)
    assert base_of(lost, str(micro_model)) == micro_model
    (tmp_path / "full").mkdir()
    refused = palestra("export", lost, tmp_path / "full", "--base", micro_model)
    assert (refused.exit_code, "already exists" in refused.stderr) == (1, True)
    (lost / "adapter_model.safetensors").write_bytes(b"torn")
    refused = palestra("export", lost, tmp_path / "out", "--base", micro_model)
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
    assert not (tmp_path / "out").exists()
