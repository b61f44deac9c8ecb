"""Programs of models are judged by tests that they cannot reach."""

from __future__ import annotations

import asyncio

import pytest

from palestra.environments.benchmarks.plain_values import decode, encode
from palestra.environments.benchmarks.program_tests import CannotJudge, ProgramTests, run_tests
from palestra.environments.benchmarks.programs import HumanEval, Mbpp
from tests.environments.benchmarks import rows
from tests.environments.benchmarks.rows import graded, tasks_of, write_rows

DOUBLED = "def doubled(values):\n    return [2 * value for value in values]\n"
ADDING = "def add_it(value):\n    return value + 12\n"


@pytest.fixture
def humaneval(tmp_path):
    return tasks_of(HumanEval, write_rows(tmp_path / "HumanEval.jsonl", rows.HUMANEVAL))


def test_completions_and_whole_functions_are_judged(humaneval):
    completion = rows.HUMANEVAL[0]["canonical_solution"]
    answers = {
        (0, completion): True,
        (0, f"{completion}\nprint(doubled([1]))\nassert False"): True,  # a completion ends before the next statement
        (0, f"Here you are:\n```python\n{DOUBLED}```\nIt doubles."): True,
        (0, f"```\nimport math\n```\nand\n```python\n{DOUBLED}```"): True,
        (0, DOUBLED): True,
        (0, f"The body is\n```python\n{completion}```"): True,
        (0, "```python\n" + DOUBLED.replace("2", "3") + "```"): False,
        (0, "I cannot do this."): False,
        (0, ""): False,
        (1, rows.HUMANEVAL[1]["canonical_solution"]): True,
        (2, rows.HUMANEVAL[2]["canonical_solution"]): True,
    }
    found = graded(HumanEval, [(humaneval[place], said) for place, said in answers])
    assert [one["passed"] for one in found] == list(answers.values())
    assert found[6]["error"] == "AssertionError: "
    assert "SyntaxError" in found[7]["error"]


CHEATS = {
    "ends with status 0": "import sys\nsys.exit(0)",
    "ends at once": "import os\nos._exit(0)",
    "ends when it is called": "def add_it(value):\n    import os\n    os._exit(0)",
    "says that it has passed": "import os\nfor pipe in range(3, 20):\n    try:\n"
    "        os.write(pipe, b'{\"passed\": true}\\n' * 9)\n    except OSError:\n        pass\n",
    "prints that it has passed": "print('{\"passed\": true}')",
    "equals everything": "class All(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
    "def add_it(value):\n    return All()",
    "changes what is built in": "import builtins\nbuiltins.AssertionError = type('Quiet', (Exception,), {})\n"
    "builtins.round = builtins.abs = builtins.eval = lambda *_: 12\n",
    "looks for the tests": "import gc, sys\nfound = [one for one in gc.get_objects() if isinstance(one, str)]\n"
    "def add_it(value):\n    text = [one for one in found if 'add_it(' in one]\n"
    "    return int(text[0].partition('== ')[2].split()[0])",
    "looks at the caller": "import sys\ndef add_it(value):\n    frame = sys._getframe()\n"
    "    while frame.f_back:\n        frame = frame.f_back\n        frame.f_locals.update(passed=True)\n",
    "reads files": "def add_it(value):\n    return open('/proc/self/cmdline').read()",
    "starts a program": "def add_it(value):\n    import subprocess\n    return subprocess.run(['true']).returncode",
    "never ends": "while True:\n    pass",
    "fills the memory": "def add_it(value):\n    return [0] * 10**10",
    "answers without end": "def add_it(value):\n    return iter(int, 1)",
    "raises what tests catch": "def add_it(value):\n    raise AssertionError",
    "raises to end the tests": "def add_it(value):\n    raise SystemExit(0)",
    "gives an object of its own": "def add_it(value):\n    return add_it",
    "sends what is no value": "import json\njson.dumps = lambda *_: '{}'\ndef add_it(value):\n    pass",
}


def test_no_cheat_passes(tmp_path):
    tasks = tasks_of(Mbpp, write_rows(tmp_path / "mbpp.jsonl", rows.MBPP[4:5]))
    quick = {name: ProgramTests(setup="", tests=str(tasks[0]["tests"]), limit_s=1.0) for name in CHEATS}

    async def judged() -> dict[str, bool]:
        found = await asyncio.gather(*(run_tests(CHEATS[name], tests) for name, tests in quick.items()))
        return {name: verdict.passed for name, verdict in zip(CHEATS, found, strict=True)}

    assert {name for name, passed in asyncio.run(judged()).items() if passed} == set()
    assert [one["passed"] for one in graded(Mbpp, [(tasks[0], ADDING)])] == [True]


def test_setup_and_several_functions_of_mbpp(tmp_path):
    tasks = tasks_of(Mbpp, write_rows(tmp_path / "mbpp.jsonl", rows.MBPP))
    area = str(rows.MBPP[3]["code"])
    answers = {(0, area): True, (0, "def area(r):\n    return 3"): False, (1, f"[BEGIN]\n{ADDING}[DONE]\nThanks"): True}
    found = graded(Mbpp, [(tasks[place], said) for place, said in answers])
    assert [one["passed"] for one in found] == list(answers.values())


@pytest.mark.parametrize(
    ("setup", "tests"),
    [("", "assert f(1) =="), ("import nowhere", "assert f(1) == 1"), ("", "assert f(lambda: 1) == 1")],
)
def test_broken_tests_say_nothing_about_the_program(setup, tests):
    with pytest.raises(CannotJudge, match="the tests of the task do not run"):
        asyncio.run(run_tests("def f(x):\n    return 1\n", ProgramTests(setup=setup, tests=tests)))


def test_values_cross_as_they_are():
    values = [1, 2.5, True, None, "é", b"\x00", 1j, (1, [2]), {1, 2}, frozenset("a"), {(1, 2): [3]}, range(3), 10**50]
    again = decode(encode(values))
    assert again == values
    assert [type(one) for one in again] == [type(one) for one in values]
    with pytest.raises(TypeError, match="a object cannot cross"):
        encode([object()])
