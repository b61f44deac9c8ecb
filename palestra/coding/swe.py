"""SWE-style rows become task folders: a repository at a commit, tests that fail and should pass, tests that pass."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from palestra.coding.errors import TaskError
from palestra.util.atomic_files import whole_folder

RUNNER = "python3 -m pytest -rA -p no:cacheprovider"
DOCKERFILE = "FROM python:3.12\nWORKDIR /app\nCOPY repository/ .\n"
IMAGE_WORKDIR = "/testbed"
"""The repository's folder in images of SWE-bench and SWE-smith."""
TEST_SCRIPT = """#!/bin/bash
# Fresh copies of the tests replace those of the working folder; then every test that should pass must.
cp -r /tests/files/. .
{command} > /tmp/tests.log 2>&1
cat /tmp/tests.log
python3 -I /tests/judge.py < /tmp/tests.log > /logs/verifier/reward.json
"""
JUDGE = '''"""Reads pytest's summary; prints the reward and its parts."""

import json
import re
import sys

summary = re.split("=+ *short test summary info *=+", sys.stdin.read())[-1]
passed = {line.removeprefix("PASSED ").strip() for line in summary.splitlines() if line.startswith("PASSED ")}
with open("/tests/expected.json", encoding="utf-8") as file:
    expected = json.load(file)
found = {name: sum(one in passed for one in ids) / max(len(ids), 1) for name, ids in expected.items()}
is_right = all(set(ids) <= passed for ids in expected.values())
print(json.dumps({"reward": int(is_right), **found}))
'''


def _listed(value: object) -> object:
    """Lists are JSON in some of the datasets."""
    return json.loads(value) if isinstance(value, str) else value


TestIds = Annotated[list[str], BeforeValidator(_listed)]


class SweRow(BaseModel):
    """A row of SWE-bench, or of a dataset of its kind."""

    model_config = ConfigDict(extra="ignore")

    instance_id: str = Field(pattern=r"^[\w.-]+$")
    repo: str
    base_commit: str | None = None
    patch: str
    """The solution; in SWE-smith, which has no base_commit, what brought the mistake in."""
    test_patch: str = ""
    problem_statement: str = Field(min_length=1)
    fail_to_pass: TestIds = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: TestIds = Field(alias="PASS_TO_PASS", default=[])

    @property
    def is_swe_smith(self) -> bool:
        return self.base_commit is None

    @property
    def test_files(self) -> list[str]:
        return sorted({one.split("::")[0] for one in (*self.fail_to_pass, *self.pass_to_pass)})


def read_rows(file: Path) -> list[SweRow]:
    """Reads rows from JSON lines, or a JSON list. Raises TaskError."""
    try:
        text = file.read_text(encoding="utf-8")
        rows = (
            json.loads(text) if text.lstrip().startswith("[") else [json.loads(one) for one in text.splitlines() if one]
        )
        return [SweRow.model_validate(row) for row in rows]
    except OSError as error:
        raise TaskError(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise TaskError(f"{file}: {'.'.join(str(one) for one in first['loc'])}: {first['msg']}") from error
    except ValueError as error:
        raise TaskError(f"{file} is neither JSON lines nor a JSON list: {error}") from error


def convert(
    rows: list[SweRow], repositories: Path, folder: Path, *, runner: str = RUNNER, image: str | None = None
) -> Iterator[Path]:
    """Makes a task folder of every row, and yields it when it is whole; one that is there already is left out. With an
    image, in whose name `{instance_id}` is replaced, the environment is the image's. Raises TaskError."""
    for row in rows:
        if not all("::" in one for one in row.fail_to_pass):
            raise TaskError(f"{row.instance_id}: {row.fail_to_pass[0]!r} is no test of pytest (file::name)")
        target = folder / row.instance_id
        if not target.exists():
            with whole_folder(target) as unfinished:
                _write(row, _repository(row, repositories), unfinished, runner, image)
            yield target


def _repository(row: SweRow, folder: Path) -> Path:
    """Finds a clone, bare or not, under one of the usual names."""
    names = (row.repo, row.repo.replace("/", "__"), row.repo.split("/")[-1])
    for name in [one + end for one in names for end in ("", ".git")]:
        if (folder / name / "HEAD").is_file() or (folder / name / ".git").exists():
            return folder / name
    raise TaskError(f"{row.instance_id}: there is no clone of {row.repo} in {folder}; make one: {', '.join(names)}")


def _write(row: SweRow, repository: Path, folder: Path, runner: str, image: str | None) -> None:
    environment, tests, solution = (folder / name for name in ("environment", "tests", "solution"))
    for one in (environment, tests / "files", solution):
        one.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        _check_out(repository, row.base_commit or row.instance_id, tree)
        if row.is_swe_smith:
            _apply(row, tree, row.patch)
        if image is None:
            shutil.copytree(tree, environment / "repository", symlinks=True)
            (environment / "Dockerfile").write_text(DOCKERFILE, encoding="utf-8")
        _apply(row, tree, row.test_patch)
        for name in row.test_files:
            if not (tree / name).is_file():
                raise TaskError(f"{row.instance_id}: {name} is not in the repository at that commit")
            (tests / "files" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, tests / "files" / name)
    reverse = "--reverse " if row.is_swe_smith else ""
    files = {
        folder / "instruction.md": row.problem_statement.strip() + "\n",
        folder / "task.toml": _settings(row, image),
        tests / "test.sh": TEST_SCRIPT.format(command=f"{runner} {shlex.join(row.test_files)}"),
        tests / "judge.py": JUDGE,
        tests / "expected.json": json.dumps(
            {"fail_to_pass": row.fail_to_pass, "pass_to_pass": row.pass_to_pass}, indent=1
        ),
        solution / "solve.sh": f"git apply {reverse}/solution/gold.patch\n",
        solution / "gold.patch": row.patch,
    }
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")


def _settings(row: SweRow, image: str | None) -> str:
    place = ""
    if image:
        name = json.dumps(image.replace("{instance_id}", row.instance_id))
        place = f'\n[environment]\ndocker_image = {name}\nworkdir = "{IMAGE_WORKDIR}"\n'
    return f"[metadata]\nrepo = {json.dumps(row.repo)}\nbase_commit = {json.dumps(row.base_commit or '')}\n{place}"


def _check_out(repository: Path, commit: str, folder: Path) -> None:
    """Files without history: what came later must not be there to be read."""
    packed = _git(["git", "-C", str(repository), "archive", "--format=tar", commit], b"")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def _apply(row: SweRow, folder: Path, patch: str) -> None:
    if patch.strip():
        try:
            _git(["git", "-C", str(folder), "apply", "-"], patch.encode())
        except TaskError as error:
            raise TaskError(f"{row.instance_id}: a patch of the row does not fit: {error}") from error


def _git(command: list[str], data: bytes) -> bytes:
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    if done.returncode:
        errors = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
        raise TaskError(f"`{' '.join(command[:1] + command[3:])}` in {command[2]}: {errors[-1]}")
    return done.stdout
