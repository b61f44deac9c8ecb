"""HumanEval and MBPP: programs that tests judge."""

from __future__ import annotations

import re
from collections.abc import Iterable

from palestra.environments.benchmarks.base import BenchmarkEnv, turn
from palestra.environments.benchmarks.files import data_files, field, first_field
from palestra.environments.benchmarks.program_tests import ProgramTests, run_tests
from palestra.environments.errors import TaskFileError
from palestra.environments.tasks import Row, read_rows
from palestra.environments.text import ConversationType
from palestra.util.json_types import JsonObject

FENCED = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
ENDS = re.compile(r"\n(?:class|def|#|if|print)")
"""Marks at which a completion without a fence has gone on to something else, as in HumanEval's paper."""
CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
NO_NAMES = {"assert", "set", "sorted", "list", "tuple", "str", "int", "float", "abs", "round", "len", "dict", "not"}


class _Programs(BenchmarkEnv):
    def program(self, reply: str) -> str:
        raise NotImplementedError

    def tests(self) -> ProgramTests:
        raise NotImplementedError

    async def grade_answer(self, reply: str) -> float:
        verdict = await run_tests(self.program(reply), self.tests())
        self._report = {"passed": verdict.passed, "error": verdict.error}
        return float(verdict.passed)


class HumanEval(_Programs):
    """Python functions to complete (HumanEval); the reward is 1 if all tests of the task pass."""

    benchmark = "humaneval"
    prompt = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}```"

    @classmethod
    def task_of(cls, row: Row, place: int) -> JsonObject:
        texts = {name: str(field(row, name)) for name in ("task_id", "prompt", "test", "entry_point")}
        return {
            "id": texts["task_id"].replace("/", "-"),
            "code": texts["prompt"],
            "test": texts["test"],
            "entry_point": texts["entry_point"],
        }

    def program(self, reply: str) -> str:
        """A whole function, in a fence or without one, comes after the task's own code, which has imports and helpers;
        anything else completes that code."""
        code, name = str(self.extras["code"]), str(self.extras["entry_point"])
        fenced = code_in(reply, name)
        answer = reply if fenced is None else fenced
        if defines(answer, name):
            return f"{code}\n    pass\n\n{answer}\n"
        return code + (answer[: found.start()] if (found := ENDS.search(answer)) else answer) + "\n"

    def tests(self) -> ProgramTests:
        name = str(self.extras["entry_point"])
        return ProgramTests(
            setup=f"{self.extras['code']}\n    pass\n",
            tests=f"{self.extras['test']}\ncheck({name})\n",
            function=name,
        )


class Mbpp(_Programs):
    """Python programs to write from a sentence and three tests (MBPP); the reward is 1 if all tests pass."""

    benchmark = "mbpp"
    prompt = (
        "You are an expert Python programmer, and here is your task: {text} "
        "Your code should pass these tests:\n\n{tests}\n"
    )
    test_ids = range(11, 511)
    example_ids = range(2, 5)

    @classmethod
    def test_rows(cls, rows: Iterable[Row]) -> Iterable[Row]:
        """The file with all of its rows has other splits, too: by their numbers, as the authors divide it."""
        rows = list(rows)
        tests = [row for row in rows if row.content.get("task_id") in cls.test_ids]
        return tests or rows

    @classmethod
    def examples(cls, rows: list[Row], options: JsonObject) -> ConversationType:
        """The three tasks that the authors show: of the file with all rows, or of the split `prompt` beside it."""
        (file, *_) = data_files(cls.about(), options.get("data"))
        beside = [row for one in sorted(file.parent.glob(f"prompt-*{file.suffix}")) for row in read_rows(one)]
        found = [row for row in (*rows, *beside) if row.content.get("task_id") in cls.example_ids]
        count = int(len(found) if options.get("shots") is None else options["shots"])
        if count > len(found):
            raise TaskFileError(f"mbpp: shots={count}, but there are {len(found)} examples in or beside {file}")
        shown = sorted(found, key=lambda row: row.content["task_id"])[:count]
        return [
            message
            for row in shown
            for message in turn(
                cls.question(cls.task_of(row, 0), options), f"```python\n{str(field(row, 'code')).strip()}\n```"
            )
        ]

    @classmethod
    def task_of(cls, row: Row, place: int) -> JsonObject:
        tests = field(row, "test_list")
        if not isinstance(tests, list):
            raise TaskFileError(f"{row.where}: 'test_list' should be a list of assert statements")
        imports = first_field(row.content, "test_imports")
        setup = [*(imports if isinstance(imports, list) else ()), first_field(row.content, "test_setup_code") or ""]
        return {
            "id": f"mbpp-{field(row, 'task_id')}",
            "text": field(row, "text", "prompt"),
            "tests": "\n".join(map(str, tests)),
            "setup": "\n".join(map(str, setup)),
        }

    def program(self, reply: str) -> str:
        names = [name for name in CALLED.findall(str(self.extras["tests"])) if name not in NO_NAMES]
        code = code_in(reply, names[0] if names else "")
        if code is None:
            code = reply.partition("[BEGIN]")[2] or reply
        return code.partition("[DONE]")[0] + "\n"

    def tests(self) -> ProgramTests:
        return ProgramTests(setup=str(self.extras["setup"]), tests=str(self.extras["tests"]))


def code_in(reply: str, name: str) -> str | None:
    """Returns the first fenced block that defines the function, or else the first; None without any."""
    blocks = FENCED.findall(reply)
    return next((one for one in blocks if defines(one, name)), blocks[0] if blocks else None)


def defines(code: str, name: str) -> bool:
    return re.search(rf"^def {name}\b", code, re.MULTILINE) is not None
