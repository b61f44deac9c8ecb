"""SWE-style rows: a local repository at a commit and the tests' names become a task that its patch solves."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from palestra.coding import TaskError, play_solution, read_task
from palestra.coding.swe import convert, read_rows
from tests.coding.folders import write
from tests.sandbox.needs import PACKAGES, needs_local, needs_packages

BROKEN = "def half(n):\n    return n * 2\n\n\ndef name():\n    return 'half'\n"
FIXED = BROKEN.replace("n * 2", "n / 2")
OLD_TEST = "from half import name\n\n\ndef test_name():\n    assert name() == 'half'\n"
NEW_TEST = OLD_TEST.replace("name\n\n", "half, name\n\n", 1) + "\n\ndef test_half():\n    assert half(4) == 2\n"


def git(repository: Path, *command: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *own, *command], cwd=repository, check=True, capture_output=True, text=True)
    return done.stdout


def patch(repository: Path, name: str, text: str) -> str:
    """The patch to another text of a file, which stays as it was."""
    before = (repository / name).read_text()
    (repository / name).write_text(text)
    found = git(repository, "diff")
    (repository / name).write_text(before)
    return found


def bench_row(folder: Path) -> dict[str, object]:
    repository = write(
        folder / "owner__half", {"Dockerfile": "FROM x", "half.py": BROKEN, "tests/test_half.py": OLD_TEST}
    )
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "one")
    commit = git(repository, "rev-parse", "HEAD").strip()
    write(repository, {"later.txt": "not at that commit"})
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "two")
    return {
        "instance_id": "owner__half-1",
        "repo": "owner/half",
        "base_commit": commit,
        "patch": patch(repository, "half.py", FIXED),
        "test_patch": patch(repository, "tests/test_half.py", NEW_TEST),
        "problem_statement": "half(4) is 8.",
        "FAIL_TO_PASS": json.dumps(["tests/test_half.py::test_half"]),
        "PASS_TO_PASS": ["tests/test_half.py::test_name"],
        "version": "1.0",
    }


def made(folder: Path, row: dict[str, object]) -> Path:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    (found,) = convert(read_rows(rows), folder, folder / "tasks", runner="python3 -m pytest -rA -p no:cacheprovider")
    with (found / "task.toml").open("a") as file:
        file.write(f'[verifier.env]\nPYTHONPATH = "{PACKAGES}:."\n')
    return found


def reward(folder: Path, command: str | None = None) -> dict[str, float]:
    return asyncio.run(play_solution(read_task(folder), command=command, host_folders=(PACKAGES,))).parts


def test_a_row_of_swe_bench_is_a_task_without_its_future(tmp_path: Path) -> None:
    task = read_task(made(tmp_path, bench_row(tmp_path)))
    assert [one.path for one in task.files] == ["/app/Dockerfile", "/app/half.py", "/app/tests/test_half.py"]
    assert "test_half()" not in (task.folder / "environment" / "repository" / "tests" / "test_half.py").read_text()
    assert "test_half()" in (task.folder / "tests" / "files" / "tests" / "test_half.py").read_text()
    assert (task.instruction, task.metadata["repo"]) == ("half(4) is 8.", "owner/half")
    assert not list(convert(read_rows(tmp_path / "rows.jsonl"), tmp_path, tmp_path / "tasks")), "it is there already"


@pytest.mark.slow
@needs_local
@needs_packages
@pytest.mark.skipif(importlib.util.find_spec("pytest") is None, reason="needs pytest")
def test_the_patch_of_a_row_solves_it_and_planted_tests_do_not(tmp_path: Path) -> None:
    folder = made(tmp_path, bench_row(tmp_path))
    assert reward(folder) == {"reward": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0, "tests": 1.0}
    assert reward(folder, "true") == {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 1.0, "tests": 0.0}
    planted = "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_call(item): item.obj = lambda: None\n"
    cheat = (
        f"cat > conftest.py <<'E'\n{planted}E\ncp conftest.py tests; echo 'def test_half(): pass' > tests/test_half.py"
    )
    assert reward(folder, cheat)["tests"] == 0.0
    assert reward(folder, "sed -i 's/n [*] 2/n \\/ 2/; s/.half./0/' half.py")["pass_to_pass"] == 0.0


@needs_local
@needs_packages
def test_a_row_of_swe_smith_has_the_patch_that_broke_it(tmp_path: Path) -> None:
    repository = write(tmp_path / "half", {"half.py": FIXED, "tests/test_half.py": NEW_TEST})
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "one")
    git(repository, "tag", "half.combine__1")
    row = {**bench_row(tmp_path / "other"), "instance_id": "half.combine__1", "repo": "swesmith/half"}
    row |= {"patch": patch(repository, "half.py", BROKEN), "test_patch": "", "base_commit": None}
    folder = made(tmp_path, row)
    assert "n * 2" in (folder / "environment" / "repository" / "half.py").read_text()
    assert reward(folder)["tests"] == 1.0


def test_what_is_wrong_with_rows_is_said_in_a_line(tmp_path: Path) -> None:
    rows, row = tmp_path / "rows.jsonl", bench_row(tmp_path)
    for changed, words in (
        ({"repo": "no/such"}, "there is no clone of no/such"),
        ({"base_commit": "0" * 40}, "git archive"),
        ({"test_patch": "no patch"}, "does not fit"),
        ({"FAIL_TO_PASS": ["test_a (b.C)"]}, "is no test of pytest"),
        ({"FAIL_TO_PASS": ["tests/none.py::test_a"]}, "is not in the repository"),
    ):
        rows.write_text(json.dumps([{**row, **changed}]))
        with pytest.raises(TaskError, match=words) as caught:
            list(convert(read_rows(rows), tmp_path, tmp_path / "tasks"))
        assert "\n" not in str(caught.value)
        assert not list((tmp_path / "tasks").glob("*")), "nothing is left of it"
    rows.write_text("{}\n")
    with pytest.raises(TaskError, match="instance_id: Field required"):
        read_rows(rows)
