"""A place that cannot be written is a sentence that names it, in every command that writes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from palestra.runs.reader import RunStatus
from palestra.runs.writer import RunFolder
from palestra.util.file_errors import file_error_text
from tests.cli.tree import COMMANDS, options, palestra
from tests.training.records import make_config

NO = "file/no"
"""A path below a file: also root cannot write there."""
WRITES = {
    ("agent", "task", "list"): ["--export", NO],
    ("agent", "warm-up"): [NO, "--count", "1"],
    ("backup",): [f"{NO}/backup.tar", "--state", "state"],
    ("data", "convert"): ["rows.jsonl", f"{NO}/out.jsonl", "--to", "messages"],
    ("data", "split"): ["rows.jsonl", NO, "--part", "eval=1"],
    ("eval",): ["arithmetic", "--limit", "1", f"runs={NO}"],
    ("gym", "aggregate"): ["-i", "rows.jsonl", "-o", f"{NO}/out.jsonl", "--offline"],
    ("gym", "new"): ["tally", "--below", NO],
    ("key", "create"): ["--name", "a", "--state", NO],
    ("model", "puppet"): [NO, "script.json"],
    ("model", "random"): [NO],
    ("platform", "openenv-package"): ["keys", NO],
    ("platform", "serve"): ["--state", NO, "--port", "0"],
    ("platform", "task", "export"): [f"{NO}/tasks.json", "--count", "1"],
    ("quota", "set"): ["me", "models=1", "--state", NO],
    ("restore",): ["backup.tar", "--state", NO],
    ("run", "export"): ["mine", "--output", f"{NO}/out.jsonl"],
    ("run", "plot"): ["mine", "--output", f"{NO}/out.png"],
    ("serve",): ["--model", "ephebe", "--state", NO, "--port", "0"],
    ("train",): ["arithmetic", f"runs={NO}"],
}
ELSEWHERE = {
    ("checkpoint", "export"),  # tests/checkpoints/test_local.py
    *((("episode", "export"), ("gym", "collect"), ("gym", "datasets"), ("gym", "reverify"), ("replica",))),  # a server
    *((("key", "list"), ("key", "revoke"), ("key", "rotate"), ("quota", "list"), ("quota", "delete"))),  # as `create`
}
PLACES = {"--output", "--export", "--below", "--state"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("rows.jsonl").write_text('{"prompt": "1 + 1?", "completion": "2"}\n{"prompt": "1 + 2?", "completion": "3"}\n')
    Path("script.json").write_text("[]")
    with RunFolder.create("runs", "mine", make_config()) as run:
        for step in (1, 2):
            run.write_metrics(step, {"reward/mean": 0.5})
        run.finish(RunStatus.DONE)


def test_the_table_has_every_command_that_names_a_place_to_write_to():
    writing = {path for path, command in COMMANDS.items() if PLACES & options(command).keys()}
    assert writing <= WRITES.keys() | ELSEWHERE


SLOW = {("model", "puppet"), ("model", "random"), ("platform", "task", "export")}
"""They import torch, or make what they write first."""


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.slow] if path in SLOW else []) for path in WRITES], ids=" ".join
)
def test_a_place_that_cannot_be_written_is_a_sentence(path: tuple[str, ...]):
    if path == ("gym", "aggregate"):
        Path("rows.jsonl").write_text(json.dumps({"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0}) + "\n")
    if path in (("backup",), ("restore",)):
        assert palestra("key", "create", "--name", "a", "--state", "state").exit_code == 0
        assert path == ("backup",) or palestra("backup", "backup.tar", "--state", "state").exit_code == 0
    result = palestra(*path, *WRITES[path])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert "file" in error
    assert "Errno" not in error


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "/x/out.png cannot be written: its file system is read-only; name another place"),
        (errno.EACCES, "/x/out.png is closed to this user; change its rights, or name another place"),
        (errno.ENOSPC, "/x/out.png cannot be written: no space is left on the disk; free some"),
        (errno.EPIPE, None),
    ],
)
def test_a_sentence_names_the_file_that_was_to_be_written(number: int, said: str | None):
    assert file_error_text(OSError(number, os.strerror(number), "/x/.out.png.17.partial")) == said


def test_other_errors_are_no_errors_of_files():
    assert file_error_text(ConnectionRefusedError(errno.ECONNREFUSED, "refused")) is None
    assert file_error_text(FileNotFoundError("our own words")) is None
    assert file_error_text(OSError(errno.ENOSPC, "no space")) == (
        "a file cannot be written: no space is left on the disk; free some"
    )
