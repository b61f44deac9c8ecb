"""The base of environments of benchmarks: one turn, tasks from files as published, settings by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from palestra.chat.tool_calls import without_thinking
from palestra.environments.benchmarks.catalogue import BENCHMARKS, Benchmark
from palestra.environments.benchmarks.files import rows_of
from palestra.environments.errors import TaskFileError
from palestra.environments.tasks import Row
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from palestra.util.json_types import JsonObject, JsonPayload
from palestra.util.suggest import did_you_mean


class BenchmarkEnv(BaseTextEnv):
    """One question and one answer. Subclasses say how a row is asked (`task_of`) and when an answer is right
    (`grade`)."""

    benchmark: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ("data", "prompt", "system", "shots")
    """Names that `config` may have."""
    prompt: ClassVar[str] = "{prompt}"
    """How a row is asked, with its fields in braces; the setting `prompt` replaces it."""

    def __init__(self, env_config: Any = None, extras: JsonObject | None = None) -> None:
        super().__init__(env_config, extras)
        self._report: JsonObject = {}

    @classmethod
    def about(cls) -> Benchmark:
        return BENCHMARKS[cls.benchmark]

    @classmethod
    def tasks(cls, split: str, env_config: Mapping[str, Any] | None = None) -> list[JsonObject]:
        """Returns the rows of its test split as tasks, or those to train on where it has some. Raises TaskFileError."""
        options = dict(env_config or {})
        for name in options.keys() - set(cls.settings):
            raise TaskFileError(f"{cls.benchmark}: no setting {name!r}; {did_you_mean(name, cls.settings)}")
        return cls.rows(options) if split == "eval" else cls.training_tasks(options)

    @classmethod
    def rows(cls, options: JsonObject) -> list[JsonObject]:
        rows = list(rows_of(cls.about(), options.get("data")))
        return cls.asked(cls.test_rows(rows), cls.examples(rows, options), options)

    @classmethod
    def training_tasks(cls, options: JsonObject) -> list[JsonObject]:
        """Returns tasks that are not among those of the test split; most benchmarks have none."""
        return []

    @classmethod
    def asked(cls, rows: Iterable[Row], shots: ConversationType, options: JsonObject) -> list[JsonObject]:
        """Returns rows as tasks with their prompts."""
        tasks = (cls.task_of(row, place) for place, row in enumerate(rows))
        return [{**task, "prompt": cls.conversation(task, shots, options)} for task in tasks]

    @classmethod
    def test_rows(cls, rows: Iterable[Row]) -> Iterable[Row]:
        return rows

    @classmethod
    def examples(cls, rows: list[Row], options: JsonObject) -> ConversationType:
        """Returns questions with their answers that stand before each question."""
        if options.get("shots"):
            raise TaskFileError(f"{cls.benchmark}: it has no examples to show (shots)")
        return []

    @classmethod
    def task_of(cls, row: Row, place: int) -> JsonObject:
        """Returns a row's id, the fields for its prompt and what grading needs. Raises TaskFileError."""
        raise NotImplementedError

    @classmethod
    def question(cls, task: JsonObject, options: JsonObject) -> str:
        template = str(options.get("prompt") or cls.prompt)
        try:
            return template.format_map(task)
        except (KeyError, IndexError, ValueError) as error:
            fields = ", ".join(task)
            raise TaskFileError(f"{cls.benchmark}: the setting prompt is no template of {fields}: {error!r}") from None

    @classmethod
    def conversation(cls, task: JsonObject, shots: ConversationType, options: JsonObject) -> ConversationType:
        system = [{"role": "system", "content": str(options["system"])}] if options.get("system") else []
        return [*system, *shots, {"role": "user", "content": cls.question(task, options)}]

    async def grade_answer(self, reply: str) -> float:
        """Returns the reward of an answer, from which reasoning was removed. Whatever it raises says nothing about the
        model: the rollout does not count."""
        raise NotImplementedError

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        if self.turns:
            raise RuntimeError(f"{self.benchmark}: the episode is over after one step")
        self.turns += 1
        reward = await self.grade_answer(without_thinking(action))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=dict(self._report))

    def get_metrics(self) -> JsonPayload:
        return {name: float(value) for name, value in self._report.items() if isinstance(value, bool)}

    def get_verdict(self) -> JsonPayload:
        return dict(self._report)


def turn(question: str, answer: str) -> ConversationType:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
