"""Answers to benchmarks of numbers and expressions: right, wrong and malformed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from palestra.environments import TaskFileError
from palestra.environments.benchmarks.function_calls import Bfcl
from palestra.environments.benchmarks.gsm8k import Gsm8k
from palestra.environments.benchmarks.instructions import IfEval
from palestra.environments.benchmarks.mathematics import Math500
from palestra.environments.benchmarks.programs import Mbpp
from tests.environments.benchmarks import rows
from tests.environments.benchmarks.rows import graded, tasks_of, write_rows


def test_last_number_is_the_answer_and_the_marked_one_is_reported(tmp_path):
    tasks = tasks_of(Gsm8k, write_rows(tmp_path / "test.jsonl", rows.GSM8K))
    answers = {
        (0, "3 rows of 6: #### 18"): (True, True),
        (0, "#### 17 is wrong, so 18."): (False, True),
        (0, "#### 18 of 20"): (True, False),
        (0, "<think>It is 18.</think> 17"): (False, False),
        (1, "$1,250"): (False, True),
        (2, "#### -3"): (True, True),
        (2, "eighteen"): (False, False),
        (2, ""): (False, False),
    }
    found = graded(Gsm8k, [(tasks[place], said) for place, said in answers])
    assert [(one["strict_match"], one["flexible_extract"]) for one in found] == list(answers.values())
    assert [one["reward"] for one in found] == [float(flexible) for _, flexible in answers.values()]


@pytest.mark.skipif("PALESTRA_GSM8K" not in os.environ, reason="PALESTRA_GSM8K names no file of GSM8K's test split")
def test_every_answer_of_the_real_file_is_right():
    tasks = tasks_of(Gsm8k, Path(os.environ["PALESTRA_GSM8K"]))
    found = graded(Gsm8k, [(task, task["answer"]) for task in tasks])
    assert len(tasks) == 1319
    assert all(one["strict_match"] and one["flexible_extract"] for one in found)
    other = graded(Gsm8k, [(task, tasks[place - 1]["answer"]) for place, task in enumerate(tasks)])
    assert sum(one["reward"] for one in other) < 0.05 * len(tasks)


def test_expressions_are_compared_by_value(tmp_path):
    tasks = tasks_of(Math500, write_rows(tmp_path / "test.jsonl", rows.MATH500))
    found = graded(
        Math500, [(tasks[0], "So $\\boxed{\\frac{2}{4}}$."), (tasks[0], "\\boxed{2}"), (tasks[0], "\\boxed{")]
    )
    assert [one["reward"] for one in found] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("env_class", "module"), [(IfEval, "lm_eval"), (Bfcl, "bfcl_eval")])
def test_grader_that_is_not_installed_is_named_with_its_commands(tmp_path, monkeypatch, env_class, module):
    monkeypatch.setenv("PALESTRA_GRADERS", str(tmp_path / "graders"))
    own = {"data": str(write_rows(tmp_path / "input_data.jsonl", rows.IFEVAL))} if env_class is IfEval else {}
    with pytest.raises(
        TaskFileError, match=f"{module} is not installed.*to install it:\n  python3 -m venv "
    ) as refused:
        env_class.tasks("eval", own)
    assert f"--grader {env_class.benchmark}=PYTHON" in str(refused.value)
    with pytest.raises(TaskFileError, match=r"cannot run .*No module named"):
        env_class.tasks("eval", {**own, "python": sys.executable})
    with pytest.raises(TaskFileError, match="nowhere is no program"):
        env_class.tasks("eval", {**own, "python": "nowhere"})


def test_category_that_is_no_single_turn_is_refused():
    with pytest.raises(TaskFileError, match="no category 'simple_pyton' of one turn; did you mean simple_python"):
        Bfcl.tasks("eval", {"categories": ["simple_pyton"]})


def test_row_of_another_form_is_named(tmp_path):
    file = write_rows(tmp_path / "mbpp.jsonl", [{**rows.MBPP[3], "test_list": "assert True"}])
    with pytest.raises(TaskFileError, match=r"mbpp.jsonl, line 1: 'test_list' should be a list"):
        tasks_of(Mbpp, file)
