"""GSM8K: word problems whose answer is a number."""

from __future__ import annotations

import re
from pathlib import Path

from palestra.environments.benchmarks.base import BenchmarkEnv, turn
from palestra.environments.benchmarks.files import data_files, field
from palestra.environments.errors import TaskFileError
from palestra.environments.tasks import Row, read_rows
from palestra.environments.text import ConversationType
from palestra.util.json_types import JsonObject

MARKED = re.compile(r"#### (\-?[0-9\.\,]+)")
ANY_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
LEFT_OUT = re.compile(r",|\$|(?s:.*#### )")


class Gsm8k(BenchmarkEnv):
    """Word problems of grade-school mathematics (GSM8K); the reward is 1 if the last number is the answer."""

    benchmark = "gsm8k"
    prompt = "{question}\n\nThink step by step. Write the answer in a last line that has only #### and the number."

    @classmethod
    def task_of(cls, row: Row, place: int) -> JsonObject:
        return {"id": f"gsm8k-{place}", "question": field(row, "question"), "answer": str(field(row, "answer"))}

    @classmethod
    def training_tasks(cls, options: JsonObject) -> list[JsonObject]:
        """The rows of the training file beside the test file, without examples before them."""
        (file, *_) = data_files(cls.about(), options.get("data"))
        train = _training_file(file)
        if train is None:
            raise TaskFileError(f"gsm8k: its training file (*train*{file.suffix}) must be beside {file}")
        tasks = cls.asked(read_rows(train), [], options)
        return [{**task, "id": f"gsm8k-train-{place}"} for place, task in enumerate(tasks)]

    @classmethod
    def examples(cls, rows: list[Row], options: JsonObject) -> ConversationType:
        """The first rows of the training split, in the dataset's own words."""
        if not (count := int(options.get("shots") or 0)):
            return []
        (file, *_) = data_files(cls.about(), options.get("data"))
        train = _training_file(file)
        if train is None:
            raise TaskFileError(f"gsm8k: shots={count} needs the training file beside {file}")
        found = [row.content for _, row in zip(range(count), read_rows(train), strict=False)]
        return [message for row in found for message in turn(cls.question(dict(row), options), str(row["answer"]))]

    async def grade_answer(self, reply: str) -> float:
        answer = normal(str(self.extras["answer"]))
        marked = MARKED.search(reply)
        self._report["strict_match"] = marked is not None and normal(marked[1]) == answer
        numbers = ANY_NUMBER.findall(reply)
        self._report["flexible_extract"] = bool(numbers) and normal(numbers[-1].strip()) == answer
        return float(self._report["flexible_extract"])


def normal(text: str) -> str:
    return LEFT_OUT.sub("", text).removesuffix(".").lower()


def _training_file(test: Path) -> Path | None:
    return next((one for one in sorted(test.parent.glob(f"*train*{test.suffix}")) if one != test), None)
