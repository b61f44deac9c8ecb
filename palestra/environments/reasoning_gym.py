"""Tasks of reasoning-gym: a generator's questions, one turn each, graded by the generator itself.

A question is held out by its own text, so that none is ever on both sides, whatever the seed. A task has the index of
its entry alone, and the entry is generated again when it is graded.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

from palestra.chat.tool_calls import without_thinking
from palestra.environments.errors import UnknownEnvironment
from palestra.environments.held_out import is_held_out
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput
from palestra.util.json_types import JsonMapping, JsonObject
from palestra.util.suggest import did_you_mean

PACKAGE = "reasoning_gym"
COMPOSITE = "composite"
SIZE, SEED = 2000, 0
SETTINGS = {"args", "curriculum", "system_prompt"}


class Generator(NamedTuple):
    dataset: Any
    level: int | None
    """The level of the curriculum, if it is one of several."""


class ReasoningGym(BaseTextEnv):
    """A question of reasoning-gym: the reward is the generator's own score of the answer, from 0 to 1."""

    generator: ClassVar[str] = ""

    @classmethod
    def tasks(cls, split: Literal["train", "eval"], env_config: JsonMapping | None = None) -> list[JsonObject]:
        return list(_rows(cls.generator, env_config or {}, split))

    def __init__(self, env_config: Any = None, extras: JsonObject | None = None) -> None:
        super().__init__(env_config, extras)
        generators = _generators(self.generator, env_config or {})
        self._dataset = generators[self.extras.get("part", 0)].dataset
        self._entry = self._dataset[self.extras["index"]]
        self._has_answer = True

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self.turns:
            raise RuntimeError("reasoning_gym: the episode is over after one step")
        self.turns += 1
        answer = answer_of(action)
        self._has_answer = bool(answer)
        reward = float(self._dataset.score_answer(answer, self._entry))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"answer": answer})

    def get_metrics(self) -> JsonObject:
        return {"parse_error": 0.0 if self._has_answer else 1.0}

    def get_verdict(self) -> JsonObject:
        return {"expected": str(self._entry["answer"])}


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
    for part, (dataset, level) in enumerate(_generators(name, config)):
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


def _generators(name: str, config: JsonMapping) -> Sequence[Generator]:
    if unknown := sorted(set(config) - SETTINGS):
        raise ValueError(f"{PACKAGE}:{name} has no setting {unknown[0]!r}; there are: {', '.join(sorted(SETTINGS))}")
    return _made(name, json.dumps([config.get("args") or {}, config.get("curriculum")], sort_keys=True))


@cache
def _made(name: str, settings: str) -> Sequence[Generator]:
    args, curriculum = json.loads(settings)
    args = {"size": SIZE, "seed": SEED, **args}
    if curriculum is None:
        return [Generator(_dataset(name, args), None)]
    levels = curriculum if isinstance(curriculum, list) else [curriculum]
    return [Generator(_at_level(name, level, args), place) for place, level in enumerate(levels)]


def _dataset(name: str, args: JsonObject) -> Any:
    if name == COMPOSITE:
        spec = importlib.import_module(f"{PACKAGE}.composite").DatasetSpec
        args = {**args, "datasets": [spec(**{"weight": 1.0, "config": {}, **one}) for one in args["datasets"]]}
    return importlib.import_module(PACKAGE).create_dataset(name, **args)


def _at_level(name: str, level: int | Mapping[str, int], args: JsonObject) -> Any:
    """Makes a generator of the package's curriculum: at this level in everything, or with a level for each attribute;
    `args` are added."""
    factory = importlib.import_module(f"{PACKAGE}.factory")
    if not factory.has_curriculum(name):
        raise ValueError(f"reasoning-gym has no curriculum for {name!r}; leave out config.curriculum")
    curriculum = factory.create_curriculum(name)
    if isinstance(level, int):
        curriculum.set_global_level(level)
    else:
        for attribute, at in level.items():
            curriculum.set_attr_level(attribute, at)
    return factory.DATASETS[name][0](config=curriculum.generate_configuration(args))
