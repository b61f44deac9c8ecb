"""Checkpoints of a run at a server: listed, downloaded, exported, deleted."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from palestra.cli import main


def palestra(*args: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, args)])


def test_checkpoint_of_a_server_is_exported_and_deleted(run_training, ephebe_url, tmp_path):
    run = run_training("saved", steps=1)
    at = ("--server", ephebe_url, "--json")
    (saved,) = json.loads(palestra("list", run.path, "--json").stdout)
    assert (saved["step"], saved["server"], saved["folder"]) == (1, ephebe_url, None)
    done = palestra("export", run.path, tmp_path / "merged", "--as", "merged", "--check", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["check"]["mean_difference"] < json.loads(done.stdout)["check"]["change"] / 5
    paths = {one["tinker_path"] for one in json.loads(palestra("list", *at).stdout)}
    assert saved["address"] in paths
    assert not [path for path in paths if "external_weights/export-" in path]  # made for the download alone
    assert palestra("delete", saved["address"], "--server", ephebe_url).exit_code == 0
    assert palestra("export", run.path, tmp_path / "gone").exit_code == 3
    assert palestra("list", "--server", "http://127.0.0.1:1").exit_code == 4
