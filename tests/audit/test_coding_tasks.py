"""Coding tasks: a defect of each kind is found, and nothing in a sound one."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from palestra.audit import AuditReport, AuditSettings, FindingKind, audit_coding
from palestra.coding import read_tasks
from tests.coding import folders
from tests.sandbox.needs import needs_local

pytestmark = needs_local
slow = partial(pytest.param, marks=pytest.mark.slow)
K = FindingKind

EXITS = {
    "environment/src/main.py": "print(6 * 8)\n",
    "tests/test.sh": "#!/bin/bash\npython3 main.py; echo $((! $?)) > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "echo 'print(42)' > main.py\n",
}
RUNS = {
    **EXITS,
    "tests/test.sh": "#!/bin/bash\nif [ -f main.py ]; then python3 main.py | grep -c 42; else echo; fi "
    "> /logs/verifier/reward.txt\n",
}


def audited(folder: Path) -> AuditReport:
    return asyncio.run(audit_coding(read_tasks(folder), AuditSettings(timeout_s=60)))


@pytest.mark.parametrize(
    ("changed", "kinds"),
    [
        slow({}, set()),
        slow({"solution/solve.sh": "echo 41 > answer.txt\n"}, {K.GOLD_FAILS}),
        slow({"solution/solve.sh": "no-such-program\n"}, {K.GOLD_FAILS}),
        slow({"tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"}, {K.IDLE_PAYS, K.NO_VARIANCE}),
        (EXITS, {K.IDLE_PAYS, K.NO_VARIANCE}),
        slow({"environment/src/tests/sum.txt": "six times seven is 42\n", "tests/sum.txt": "six times seven is 42\n"},
             {K.ANSWER_LEAK}),
        slow(RUNS, {K.CRASH}),
        slow({"tests/test.sh": '#!/bin/bash\ngrep -q 42 answer.txt && echo "0.$RANDOM" > /logs/verifier/reward.txt\n'
              "test -f /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"},
             {K.GOLD_FAILS, K.NONDETERMINISTIC}),
    ],
)  # fmt: skip
def test_a_planted_defect_is_found(tmp_path: Path, changed: dict[str, str], kinds: set[FindingKind]) -> None:
    report = audited(folders.harbor(tmp_path / "task", **changed))
    assert {one.kind for one in report.findings} == kinds, [one.seen for one in report.findings]


@pytest.mark.slow
def test_a_cheat_that_pays_is_named(tmp_path: Path) -> None:
    failing = {**EXITS, "environment/src/main.py": "raise SystemExit(1)\n"}
    report = audited(folders.harbor(tmp_path / "task", **failing))
    assert {one.kind for one in report.findings} == {K.CHEAT_PAYS}
    assert "exiting 0" in {one.probe for one in report.findings}


@pytest.mark.slow
def test_the_same_task_twice_is_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folders.harbor(tmp_path / name)
    assert {one.kind for one in audited(tmp_path).findings} == {K.DUPLICATE_TASKS}
