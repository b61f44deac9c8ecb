"""Task folders are read as they are; what is wrong with one is said in a line that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.coding import TaskError, read_task, read_tasks
from palestra.coding.task import RunStep, VerifierFormat
from palestra.sandbox.spec import GIB, MIB
from tests.coding import folders


def test_a_folder_in_harbors_format_is_read_as_it_is(tmp_path: Path) -> None:
    task = read_task(folders.harbor(tmp_path / "answer"))
    assert (task.id, task.workdir, task.level, task.tags) == ("answer", "/app", "easy", ["a"])
    assert task.instruction == "Write the answer into answer.txt."
    assert [one.path for one in task.files] == ["/app/question.txt"]
    assert task.steps[-1] == RunStep("mkdir -p out &&    echo made > out/made.txt", "/app")
    assert (task.limits.agent_s, task.limits.verifier_s) == (30, 20)
    assert task.needs_image is task.needs_network is None


def test_a_folder_in_terminal_benchs_format_is_read_as_it_is(tmp_path: Path) -> None:
    task = read_task(folders.terminal_bench(tmp_path / "answer"))
    assert task.verifier_format == VerifierFormat.PYTEST_SUMMARY
    assert [one.path for one in task.files] == ["/app/question.txt"], "neither tests nor solution, nor the task itself"
    assert (task.limits.agent_s, task.limits.verifier_s, task.level) == (30, 60, "easy")


@pytest.mark.parametrize(
    "text", ["cpus = 2\nmemory_mb = 4096\nstorage_mb = 512", "cpus = 2\nmemory = '4G'\nstorage = '512M'"]
)
def test_limits_have_harbors_names_of_today_and_of_before(tmp_path: Path, text: str) -> None:
    limits = read_task(folders.harbor(tmp_path, **{"task.toml": f"[environment]\n{text}\n"})).limits
    assert (limits.cpus, limits.memory_bytes, limits.disk_bytes) == (2, 4 * GIB, 512 * MIB)


def test_without_a_dockerfile_the_environments_files_are_the_working_folder(tmp_path: Path) -> None:
    task = read_task(folders.cases(tmp_path, "$ true\n", **{"environment/a/b.py": "1"}))
    assert [one.path for one in task.files] == ["/app/a/b.py"]


@pytest.mark.parametrize(
    "line",
    [
        "RUN apt-get update && apt-get install -y jq",
        "RUN mkdir x && pip install y",
        "RUN echo $(curl x)",
        "COPY --from=other /uv /bin/uv",
        "ADD https://example.com/x.tar.gz /x",
        "COPY missing.txt .",
        "FROM second",
        "ENV A=$B",
    ],
)
def test_a_dockerfile_that_needs_docker_says_which_line(tmp_path: Path, line: str) -> None:
    dockerfile = f"FROM ubuntu\nWORKDIR /app\n{line}\n"
    task = read_task(folders.harbor(tmp_path / "a", **{"environment/Dockerfile": dockerfile}))
    assert f"Dockerfile, line 3: {line}" in str(task.needs_image)
    own = {"environment/Dockerfile": dockerfile, "task.toml": "[palestra]\nlocal = true\n"}
    assert read_task(folders.harbor(tmp_path / "b", **own)).needs_image is None


@pytest.mark.parametrize(
    "line", ["npm install", "curl https://a/b > c", "apt-get install -y jq", "git clone https://a"]
)
def test_tests_that_need_a_network_are_known(tmp_path: Path, line: str) -> None:
    task = read_task(folders.harbor(tmp_path, **{"tests/test.sh": f"#!/bin/bash\n{line}\n"}))
    assert f"test.sh, line 2: {line}" in str(task.needs_network)


@pytest.mark.parametrize(
    "line",
    [
        "apt-get update -y",
        "apt-get install -y curl",
        "curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh",
        "if uvx -w pytest==8.4.1 pytest x; then",
        "uv add pytest==8.4.1",
        "pip install pytest",
    ],
)
def test_installers_of_test_tools_have_stand_ins(tmp_path: Path, line: str) -> None:
    task = read_task(folders.harbor(tmp_path, **{"tests/test.sh": f"#!/bin/bash\n{line}\n"}))
    assert (task.has_installers, task.needs_network) == (True, None)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"task.toml": "a ="}, "task.toml is not TOML"),
        ({"task.toml": "[agent]\ntimeout_sec = 'x'"}, "task.toml: agent.timeout_sec"),
        ({"task.toml": "[palestra]\nlocall = true"}, "task.toml: palestra.locall"),
        ({"task.toml": "[[palestra.reward]]\nname = 'lint'\nkind = 'command'"}, "kind 'command'"),
        ({"task.toml": "[[palestra.reward]]\nname = 'tests'\nrequires = 'x'"}, "requires what is not there"),
        ({"task.toml": "[[palestra.reward]]\nname = 'cases'"}, "tests/ has tests"),
        ({"task.toml": "[[steps]]\nname = 'a'"}, "several steps"),
        ({"task.toml": "[environment]\nos = 'windows'"}, "Linux only"),
        ({"instruction.md": ""}, "instruction.md is missing or empty"),
        ({"tests/test.sh": ""}, "neither test.sh nor cases.txt"),
        ({"environment/Dockerfile": "FROM x"}, "no WORKDIR"),
        ({"environment/Dockerfile": "FROM x\nWORKDIR /a\nCOPY ../tests /t"}, "leads out of"),
        ({"environment/docker-compose.yaml": "services: {}"}, "several containers"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, changed: dict[str, str], words: str) -> None:
    with pytest.raises(TaskError, match=words.replace("[", r"\[")) as caught:
        read_task(folders.harbor(tmp_path, **changed))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_link_out_of_a_task_is_refused(tmp_path: Path) -> None:
    folder = folders.harbor(tmp_path / "a")
    (folder / "environment" / "src" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="leads out of"):
        read_task(folder)


def test_names_are_hidden_only_where_the_format_has_them(tmp_path: Path) -> None:
    nested = {"src/tests/a.py": "1", "src/Dockerfile": "x"}
    task = read_task(folders.terminal_bench(tmp_path / "a", **nested))
    assert [one.path for one in task.files] == ["/app/question.txt", "/app/src/Dockerfile", "/app/src/tests/a.py"]
    explicit = "FROM base\nWORKDIR /app\nCOPY tests /app/tests\nCOPY solution.sh question.txt ./\n"
    task = read_task(folders.terminal_bench(tmp_path / "b", Dockerfile=explicit))
    assert [one.path for one in task.files] == ["/app/question.txt"]


def test_a_folder_of_tasks_is_read_in_order(tmp_path: Path) -> None:
    folders.harbor(tmp_path / "b")
    folders.terminal_bench(tmp_path / "a")
    (tmp_path / "words").mkdir()
    assert [one.id for one in read_tasks(tmp_path)] == ["a", "b"]
    assert [one.id for one in read_tasks(tmp_path / "a")] == ["a"]
    with pytest.raises(TaskError, match="there are no tasks"):
        read_tasks(tmp_path / "words")
    with pytest.raises(TaskError, match=r"neither task\.toml nor task\.yaml"):
        read_task(tmp_path / "words")
