"""IFEval: prompts with instructions that programs can check."""

from __future__ import annotations

from pathlib import Path

from palestra.environments.benchmarks.base import BenchmarkEnv
from palestra.environments.benchmarks.files import field
from palestra.environments.benchmarks.grader_python import grader_python, tasks_from
from palestra.environments.grading.grader_processes import ChildError, shared_graders
from palestra.environments.tasks import Row
from palestra.util.json_types import JsonObject, JsonPayload

CHILD = "palestra.environments.benchmarks.ifeval_child"
LIMIT_S = 30.0


class CannotCheck(Exception):
    """A check raised: this says nothing about the answer."""


class IfEval(BenchmarkEnv):
    """Prompts with instructions that can be checked (IFEval); the reward is 1 if all of them are followed, strictly."""

    benchmark = "ifeval"
    settings = (*BenchmarkEnv.settings, "python")

    @classmethod
    def rows(cls, options: JsonObject) -> list[JsonObject]:
        found = super().rows(options)
        python = grader_python(cls.about(), options.get("python"))
        tasks_from(CHILD, python, "check")
        return [{**task, "python": str(python)} for task in found]

    @classmethod
    def task_of(cls, row: Row, place: int) -> JsonObject:
        names = ("key", "prompt", "instruction_id_list", "kwargs")
        checked = {name: field(row, name) for name in names}
        return {"id": f"ifeval-{checked['key']}", "prompt": checked["prompt"], "row": checked}

    async def grade_answer(self, reply: str) -> float:
        graders = shared_graders(CHILD, Path(str(self.extras["python"])))
        try:
            found = await graders.request({"row": self.extras["row"], "answer": reply}, LIMIT_S)
        except ChildError as error:  # an answer that takes more time than any text does
            self._report = {"prompt_level_strict": False, "prompt_level_loose": False, "error": str(error)}
            return 0.0
        if "error" in found:
            raise CannotCheck(f"a check of IFEval raised {found['error']}")
        followed = {
            "inst_level_strict": found["inst_level_strict_acc"],
            "inst_level_loose": found["inst_level_loose_acc"],
        }
        self._report = {
            "prompt_level_strict": bool(found["prompt_level_strict_acc"]),
            "prompt_level_loose": bool(found["prompt_level_loose_acc"]),
            **followed,
            "instructions": list(self.extras["row"]["instruction_id_list"]),
        }
        return float(found["prompt_level_strict_acc"])

    def get_metrics(self) -> JsonPayload:
        lists = {name: one for name, one in self._report.items() if name.startswith("inst_level") and one}
        shares = {name: sum(one) / len(one) for name, one in lists.items()}
        return {**super().get_metrics(), **shares}
