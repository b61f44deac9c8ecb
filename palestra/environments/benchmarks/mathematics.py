r"""MATH-500 and AIME: problems whose answer is an expression in `\boxed{}`."""

from __future__ import annotations

from pathlib import Path

from palestra.environments.benchmarks.base import BenchmarkEnv
from palestra.environments.benchmarks.files import field, first_field
from palestra.environments.benchmarks.grader_python import grader_python
from palestra.environments.grading.grader_processes import ChildError, shared_graders
from palestra.environments.tasks import Row
from palestra.util.json_types import JsonObject

CHILD = "palestra.environments.grading.math_child"
LIMIT_S = 20.0


class _Mathematics(BenchmarkEnv):
    settings = (*BenchmarkEnv.settings, "python")
    prompt = "{question}\n\nThink step by step, and put the final answer into \\boxed{{}}."

    @classmethod
    def rows(cls, options: JsonObject) -> list[JsonObject]:
        found = super().rows(options)
        python = grader_python(cls.about(), options.get("python"))
        return [{**task, "python": str(python)} for task in found]

    async def grade_answer(self, reply: str) -> float:
        question = {"expected": str(self.extras["answer"]), "answer": reply, "latex_first": True}
        try:
            found = await shared_graders(CHILD, Path(str(self.extras["python"]))).request(question, LIMIT_S)
        except ChildError as error:  # an answer that takes more time or memory than any right one
            found = {"is_right": False, "extracted": None, "error": str(error)}
        self._report = {"is_right": found["is_right"], "extracted": found["extracted"]}
        return float(found["is_right"])


class Math500(_Mathematics):
    """Competition mathematics (MATH-500); math-verify compares the answers."""

    benchmark = "math500"

    @classmethod
    def task_of(cls, row: Row, place: int) -> JsonObject:
        name = str(first_field(row.content, "unique_id") or f"math500-{place}")
        level = first_field(row.content, "level")
        return {
            "id": name.removeprefix("test/").removesuffix(".json").replace("/", "-"),
            "question": field(row, "problem"),
            "answer": str(field(row, "answer")),
            **({} if level is None else {"level": f"level-{level}".replace("Level ", "")}),
        }


class Aime(_Mathematics):
    """The American Invitational Mathematics Examination; math-verify compares the answers."""

    benchmark = "aime"

    @classmethod
    def task_of(cls, row: Row, place: int) -> JsonObject:
        return {
            "id": str(first_field(row.content, "ID", "id") or f"aime-{place}"),
            "question": field(row, "Problem", "problem", "question"),
            "answer": str(field(row, "Answer", "answer")),
        }
