"""Tasks of reasoning-gym: a generator's questions, one turn each, graded by the generator itself.

A question is held out by its own text, so that none is ever on both sides, whatever the seed. A task has the index of
its entry alone, and the entry is generated again when it is graded.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import base64
import importlib
import pickle
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Literal

from palestra.chat.tool_calls import without_thinking
from palestra.environments.errors import UnknownEnvironment
from palestra.environments.grading.grader_processes import ChildError, shared_graders
from palestra.environments.held_out import is_held_out
from palestra.environments.reasoning_gym_datasets import COMPOSITE, PACKAGE, generators, settings_of
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload
from palestra.util.suggest import did_you_mean

CHILD = "palestra.environments.grading.reasoning_gym_child"
LIMIT_S = 30.0
SETTINGS = {"args", "curriculum", "exact", "system_prompt"}
PLAIN = re.compile(r"[\w .,:;'/×+\n-]{0,500}")
"""Answers that are scored in this process. Some generators evaluate an answer as Python; nothing can be called, indexed
or multiplied by this."""


class ReasoningGym(BaseTextEnv):
    """A question of reasoning-gym: the reward is the generator's own score of the answer, from 0 to 1."""

    generator: ClassVar[str] = ""

    @classmethod
    def tasks(cls, split: Literal["train", "eval"], env_config: JsonMapping | None = None) -> list[JsonObject]:
        return list(_rows(cls.generator, env_config or {}, split))

    def __init__(self, env_config: Any = None, extras: JsonObject | None = None) -> None:
        super().__init__(env_config, extras)
        self._part = self.extras.get("part", 0)
        self._settings = _checked_settings(self.generator, env_config or {})
        self._dataset = generators(self.generator, self._settings)[self._part].dataset
        self._entry = self._dataset[self.extras["index"]]
        self._is_exact = bool((env_config or {}).get("exact"))
        self._has_answer = True
        self._error: str | None = None

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        if self.turns:
            raise RuntimeError("reasoning_gym: the episode is over after one step")
        self.turns += 1
        answer = answer_of(action)
        self._has_answer = bool(answer)
        score = await self._score(answer)
        reward = float(score >= 1) if self._is_exact else score
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"answer": answer})

    async def _score(self, answer: str | None) -> float:
        """Returns the generator's own score; an answer that it cannot read is worth 0."""
        if answer is None or PLAIN.fullmatch(answer):
            try:
                return float(self._dataset.score_answer(answer, self._entry))
            except Exception as error:  # boundary: code of the package
                self._error = f"{type(error).__name__}: {error}"[:500]
                return 0.0
        entry = base64.b64encode(pickle.dumps(self._entry)).decode()
        generator = {"name": self.generator, "settings": self._settings, "part": self._part}
        try:
            found = await shared_graders(CHILD).request({**generator, "entry": entry, "answer": answer}, LIMIT_S)
        except ChildError as error:  # half characters; or it takes more time than any right answer
            found = {"score": 0.0, "error": str(error)}
        self._error = found.get("error")
        return found["score"]

    def get_metrics(self) -> JsonPayload:
        return {"parse_error": 0.0 if self._has_answer else 1.0}

    def get_verdict(self) -> JsonPayload:
        return {"expected": str(self._entry["answer"]), **({"error": self._error} if self._error else {})}


def answer_of(text: str) -> str | None:
    """Returns what stands in the last `<answer>`, as reasoning-gym's own prompts ask for; without one, all that was
    said after thinking."""
    visible = without_thinking(text)
    return importlib.import_module(f"{PACKAGE}.utils").extract_answer(visible) or visible.strip() or None


@cache
def environment(name: str) -> type[ReasoningGym]:
    """Returns the class of a generator's environment. Raises UnknownEnvironment."""
    try:
        datasets: Mapping[str, Any] = importlib.import_module(f"{PACKAGE}.factory").DATASETS
    except ModuleNotFoundError as error:
        raise UnknownEnvironment(
            f"environment '{PACKAGE}:{name}' needs {error.name}; to install: pip install 'palestra[reasoning-gym]'"
        ) from None
    if name not in datasets:
        raise UnknownEnvironment(f"reasoning-gym has no generator {name!r}; {did_you_mean(name, sorted(datasets))}")
    doc = datasets[name][0].__doc__ or name
    return type(name, (ReasoningGym,), {"generator": name, "__doc__": doc})


def _rows(name: str, config: JsonMapping, split: str) -> Iterator[JsonObject]:
    for part, (dataset, level) in enumerate(generators(name, _checked_settings(name, config))):
        seen: set[str] = set()
        for index in range(len(dataset)):
            entry = dataset[index]
            question = str(entry["question"])
            if question in seen or is_held_out(question) != (split == "eval"):
                continue
            seen.add(question)
            row: JsonObject = {"id": f"{index}", "prompt": _prompt(question, config), "index": index}
            if level is not None:
                row |= {"id": f"level-{level}-{index}", "part": part, "level": str(level)}
            elif name == COMPOSITE:
                row["level"] = entry["metadata"]["source_dataset"]  # reported apart
            yield row


def _prompt(question: str, config: JsonMapping) -> list[JsonObject]:
    own = config.get("system_prompt")
    named: Mapping[str, str] = importlib.import_module(f"{PACKAGE}.utils").SYSTEM_PROMPTS
    system = [{"role": "system", "content": named.get(own, own)}] if own else []
    return [*system, {"role": "user", "content": question}]


def _checked_settings(name: str, config: JsonMapping) -> str:
    if unknown := sorted(set(config) - SETTINGS):
        raise ValueError(f"{PACKAGE}:{name} has no setting {unknown[0]!r}; there are: {', '.join(sorted(SETTINGS))}")
    return settings_of(config)
