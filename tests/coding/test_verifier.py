"""The verifier: what an agent left decides, and nothing that it left for the verifier."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from palestra.coding import (
    CodingVerdict,
    TaskError,
    VerifierError,
    diff,
    play_solution,
    prepare,
    read_task,
    task_spec,
    verify,
)
from palestra.sandbox import ExecResult, SandboxError, sandbox
from tests.coding import folders
from tests.sandbox.needs import needs_local

pytestmark = needs_local
slow = partial(pytest.param, marks=pytest.mark.slow)


def play(folder: Path, command: str) -> CodingVerdict:
    """The verdict on what a command leaves."""
    return asyncio.run(play_solution(read_task(folder), command=command))


def test_the_solution_is_worth_one_and_nothing_is_worth_nothing(tmp_path: Path) -> None:
    for make in (folders.harbor, folders.terminal_bench):
        folder = make(tmp_path / make.__name__)
        gold = asyncio.run(play_solution(read_task(folder)))
        assert (gold.reward, gold.parts) == (1.0, {"tests": 1.0}), make.__name__
        assert play(folder, "true").reward == 0.0


def test_the_agent_sees_the_environment_and_no_tests(tmp_path: Path) -> None:
    async def look(folder: Path) -> ExecResult:
        task = read_task(folder)
        async with sandbox("local", await task_spec(task, env={"KEY": "1"})) as box:
            await prepare(task, box)
            return await box.exec("find /app -type f | sort; ls / | tr '\\n' ' '; echo $KEY")

    seen = asyncio.run(look(folders.harbor(tmp_path / "harbor"))).text
    assert seen.startswith("/app/out/made.txt\n/app/question.txt\n")
    assert not {"tests", "solution", "logs"} & set(seen.split())
    assert asyncio.run(look(folders.terminal_bench(tmp_path / "tb"))).text.splitlines()[0] == "/app/question.txt"


@pytest.mark.parametrize(
    "cheat",
    [
        "mkdir -p tests logs/verifier; echo 1 > logs/verifier/reward.txt; echo 'echo 1' > tests/test.sh",
        "mkdir bin; echo echo 42 > bin/cat; chmod +x bin/cat; echo PATH=/app/bin > ~/.bashrc; cp ~/.bashrc ~/.profile",
        "(while true; do echo 1 > /logs/verifier/reward.txt; done) 2>/dev/null & exit 0",
        slow("ln -s /tests/expected.txt answer.txt.link; echo 42 > /tmp/answer.txt; cd /; echo 42"),
        slow("rm -rf /app/* && exit 0"),
    ],
)
def test_what_was_planted_for_the_verifier_does_not_decide(tmp_path: Path, cheat: str) -> None:
    assert play(folders.harbor(tmp_path), cheat).reward == 0.0


PYTEST_LIKE = """#!/bin/bash
ls conftest.py sitecustomize.py pytest.ini 2>/dev/null | wc -l > /logs/verifier/reward.txt
"""


def test_files_that_change_a_test_run_are_as_the_task_has_them(tmp_path: Path) -> None:
    plain = {"tests/test.sh": PYTEST_LIKE}
    assert play(folders.harbor(tmp_path / "a", **plain), "touch conftest.py sitecustomize.py pytest.ini").reward == 0.0
    kept = {
        "environment/src/conftest.py": "as it was",
        "tests/test.sh": "#!/bin/sh\ngrep -c 'as it was' conftest.py > /logs/verifier/reward.txt\n",
    }
    assert play(folders.harbor(tmp_path / "b", **kept), "echo other > conftest.py").reward == 1.0
    own = {**plain, "task.toml": "[palestra]\nprotect = []\n"}
    assert play(folders.harbor(tmp_path / "c", **own), "touch conftest.py").reward == 1.0


def test_failures_of_the_verifier_are_told_from_those_of_the_agent(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match="status 3 and wrote no reward") as caught:
        play(folders.harbor(tmp_path / "a", **{"tests/test.sh": "#!/bin/sh\necho why; exit 3\n"}), "true")
    assert caught.value.log == "why\n"
    with pytest.raises(VerifierError, match="should have numbers"):
        play(folders.harbor(tmp_path / "b", **{"tests/test.sh": "echo nan > /logs/verifier/reward.txt\n"}), "true")
    with pytest.raises(VerifierError, match="without pytest's summary"):
        play(folders.terminal_bench(tmp_path / "c", **{"run-tests.sh": "exit 1\n"}), "true")
    late = {"tests/test.sh": "#!/bin/sh\nsh ./slow.sh\n", "task.toml": "[verifier]\ntimeout_sec = 0.5\n"}
    verdict = play(folders.harbor(tmp_path / "d", **late), "echo sleep 9 > slow.sh")
    assert (verdict.reward, "took longer than 0.5 s" in verdict.log) == (0.0, True)


@pytest.mark.parametrize(
    ("left", "value"),
    [
        ("mkdir d; touch d/conftest.py answer.txt; chmod 500 d; echo 42 > answer.txt", 1.0),
        slow("echo 42 > answer.txt; truncate -s 1200M hole", 0.0),
        slow("echo 42 > answer.txt; rm -r tests; touch tests", 0.0),
        slow("echo 42 > answer.txt; mkdir conftest.py; ln -s / up", 1.0),
    ],
)
def test_an_agent_cannot_make_the_verifier_fail(tmp_path: Path, left: str, value: float) -> None:
    folder = folders.harbor(tmp_path, **{"environment/src/tests/conftest.py": "1"})
    assert play(folder, left).reward == value


def test_an_agents_sandbox_that_has_ended_is_no_failure_of_the_verifier(tmp_path: Path) -> None:
    async def lost() -> None:
        task = read_task(folders.harbor(tmp_path))
        async with sandbox("local", await task_spec(task)) as box:
            await box.stop()
            await verify(task, box)

    with pytest.raises(SandboxError, match="stopped"):
        asyncio.run(lost())


def test_named_rewards_are_parts(tmp_path: Path) -> None:
    script = f"#!/bin/sh\necho '{json.dumps({'speed': 0.5, 'size': 1})}' > /logs/verifier/reward.json\n"
    verdict = play(folders.harbor(tmp_path, **{"tests/test.sh": script}), "true")
    assert (verdict.reward, verdict.parts) == (0.75, {"speed": 0.5, "size": 1.0, "tests": 0.75})


PARTS = """
[[palestra.reward]]
name = "tests"
kind = "cases"
score = "share"
weight = 0.5

[[palestra.reward]]
name = "lint"
kind = "command"
command = "python3 -m py_compile *.py"
weight = 0.25

[[palestra.reward]]
name = "diff"
lines = 2
weight = 0.25
requires = "tests"
"""
TRANSCRIPT = "$ python3 one.py\n1\n$ python3 -c 'import one; print(one.two())'\n2\n"


@pytest.mark.slow
def test_a_reward_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    folder = folders.cases(tmp_path, TRANSCRIPT, PARTS, **{"environment/one.py": "print(1)\n"})
    nothing = play(folder, "true")
    assert (nothing.reward, nothing.parts) == (0.5, {"tests": 0.5, "lint": 1.0, "diff": 0.0})
    solved = play(
        folder, "echo 'two = lambda: 2 if __name__ == \"one\" else 0' >> one.py; sed -i 's/^p/if 1: p/' one.py"
    )
    assert solved.parts["lint"] == 1.0
    assert solved.parts["tests"] == 0.5, "importing it prints, too"
    right = "printf 'def two():\\n    return 2\\nif __name__ == \"__main__\":\\n    print(1)\\n' > one.py"
    assert play(folder, right).parts == {"tests": 1.0, "lint": 1.0, "diff": 0.0}
    short = "printf 'two=lambda: 2\\n__name__ == \"__main__\" and print(1)\\n' > one.py"
    verdict = play(folder, short)
    assert verdict.parts == {"tests": 1.0, "lint": 1.0, "diff": 0.5}
    assert verdict.reward == 0.875
    assert play(folder, "echo 'x x' > one.py; echo 'print()' > py_compile.py").parts["lint"] == 0.0


def test_a_change_is_shown_as_a_patch(tmp_path: Path) -> None:
    async def changed(command: str) -> str:
        task = read_task(folders.harbor(tmp_path))
        async with sandbox("local", await task_spec(task)) as box:
            await prepare(task, box)
            await box.exec(command)
            return await diff(task, box)

    assert asyncio.run(changed("mkdir __pycache__; touch __pycache__/x.pyc")) == ""
    patch = asyncio.run(changed("echo 7 > question.txt; rm out/made.txt; echo new > new.txt; git init -q ."))
    assert "--- a/question.txt\n+++ b/question.txt\n@@ -1 +1 @@\n-6 * 7\n+7\n" in patch
    assert "deleted file" in patch
    assert "+new" in patch
    assert ".git/" not in patch


def test_a_task_that_cannot_be_played_says_why(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"only with docker or podman: .*line 2: RUN pip install x"):
        play(
            folders.harbor(tmp_path / "a", **{"environment/Dockerfile": "FROM x\nRUN pip install x\nWORKDIR /a\n"}),
            "true",
        )
    with pytest.raises(TaskError, match="no network"):
        play(folders.harbor(tmp_path / "b", **{"tests/test.sh": "npm install\n"}), "true")
    with pytest.raises(TaskError, match="failed without an image: "):
        play(
            folders.harbor(tmp_path / "c", **{"environment/Dockerfile": "FROM x\nWORKDIR /a\nRUN cp no no2\n"}), "true"
        )


def test_cases_compare_what_is_printed_and_the_status(tmp_path: Path) -> None:
    text = "$ cat a b\n1\n\n2\n$ sh x.sh\ntwo\n[3]\n$ false\n[1]\n$ true\n$ sleep 99\n[124]\n"
    folder = folders.cases(
        tmp_path, text.replace("sleep 99", "timeout 0.1 sleep 9"), **{"environment/x.sh": "echo two; exit 3"}
    )
    assert play(folder, "printf '1\\n\\n' > a; echo 2 > b").reward == 1.0
    verdict = play(folder, "printf '1\\n' > a; echo 2 > b")
    assert verdict.reward == 0.0
    assert "4 of 5 cases passed\n$ cat a b\n1\n2\n(expected)\n1\n\n2" in verdict.log
    with pytest.raises(VerifierError, match="begins with a command"):
        play(folders.cases(tmp_path / "other", "hello\n"), "true")
