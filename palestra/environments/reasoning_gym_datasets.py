"""Datasets of reasoning-gym, as a config names them: a generator with its arguments, or levels of its curriculum."""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from palestra.util.json_types import JsonMapping, JsonObject

PACKAGE = "reasoning_gym"
COMPOSITE = "composite"
SIZE, SEED = 2000, 0


class Generator(NamedTuple):
    dataset: Any
    level: int | None
    """The level of the curriculum, if it is one of several."""


def settings_of(config: JsonMapping) -> str:
    """Returns what `generators` takes, as text."""
    return json.dumps([config.get("args") or {}, config.get("curriculum")], sort_keys=True)


@cache
def generators(name: str, settings: str) -> Sequence[Generator]:
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
