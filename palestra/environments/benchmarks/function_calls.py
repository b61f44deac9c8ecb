"""BFCL: function calls of the Berkeley leaderboard, in one turn, written as text."""

from __future__ import annotations

from pathlib import Path

from palestra.environments.benchmarks.base import BenchmarkEnv
from palestra.environments.benchmarks.grader_python import grader_python, tasks_from
from palestra.environments.errors import TaskFileError
from palestra.environments.grading.grader_processes import ChildError, shared_graders
from palestra.util.json_types import JsonObject
from palestra.util.suggest import did_you_mean

CHILD = "palestra.environments.benchmarks.bfcl_child"
LIMIT_S = 30.0
CATEGORIES = (
    *("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "simple_java", "simple_javascript"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance"),
)
"""Categories of one turn; all others need the leaderboard's own worlds."""


class Bfcl(BenchmarkEnv):
    """Function calls (BFCL v4, one turn, as text); the leaderboard's checker says which are right."""

    benchmark = "bfcl"
    settings = ("categories", "python")

    @classmethod
    def rows(cls, options: JsonObject) -> list[JsonObject]:
        chosen = options.get("categories") or list(CATEGORIES)
        for one in chosen:
            if one not in CATEGORIES:
                raise TaskFileError(f"bfcl: no category {one!r} of one turn; {did_you_mean(str(one), CATEGORIES)}")
        python = grader_python(cls.about(), options.get("python"))
        found = tasks_from(CHILD, python, "tasks", *chosen)
        return [{**task, "python": str(python), "level": task["category"]} for task in found]

    async def grade_answer(self, reply: str) -> float:
        names = ("category", "functions", "answers")
        question = {"task": {name: self.extras[name] for name in names}, "answer": reply}
        try:
            found = await shared_graders(CHILD, Path(str(self.extras["python"]))).request(question, LIMIT_S)
        except ChildError as error:  # an answer that takes more time than any call
            found = {"valid": False, "error": str(error)}
        self._report = {"is_right": found["valid"], "error": found["error"]}
        return float(found["valid"])
