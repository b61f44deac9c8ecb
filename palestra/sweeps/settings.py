"""The settings of a sweep's runs: values, ranges and distributions of config keys, as a grid or as draws.

What may be written:

    optimizer.lr=1e-4,3e-4,1e-3   a list            seed=0..7                    a range, both ends included
    optimizer.lr=loguniform(1e-5,1e-3), uniform(0,1), randint(1,8)               what draws are made from
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from palestra.config.errors import ConfigError
from palestra.config.load import parse_yaml

SEED = "seed"
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
DRAWN = re.compile(r"(loguniform|uniform|randint)\(\s*([^,()]+?)\s*,\s*([^,()]+?)\s*\)")
TRIES = 100  # for each draw that must differ from the others
Setting = dict[str, Any]
"""Values by dotted keys."""


class Distribution(Struct, frozen=True):
    """What values of a key are drawn from."""

    kind: str
    """loguniform, uniform or randint."""
    low: float
    high: float

    def draw(self, random_: random.Random) -> float | int:
        if self.kind == "randint":
            return random_.randint(int(self.low), int(self.high))
        if self.kind == "uniform":
            return _rounded(random_.uniform(self.low, self.high))
        return _rounded(math.exp(random_.uniform(math.log(self.low), math.log(self.high))))


Choice = list[Any] | Distribution


def split_overrides(overrides: list[str]) -> tuple[dict[str, str], list[str]]:
    """Divides KEY=VALUE texts into those with several values, by key, and those with one."""
    vary: dict[str, str] = {}
    fixed: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if _is_varied(value):
            vary[key] = value
        else:
            fixed.append(text)
    return vary, fixed


def parse_choice(key: str, value: object) -> Choice:
    """The values that a key takes, from a list of YAML or from a text. Raises ConfigError."""
    if isinstance(value, list):
        choice: Choice = [one for part in value for one in _expanded(part)]
    elif isinstance(value, str) and (drawn := DRAWN.fullmatch(value.strip())):
        return _distribution(key, *drawn.groups())
    elif isinstance(value, str):
        choice = [one for part in parse_yaml(f"[{value}]", f"{key}={value}") for one in _expanded(part)]
    else:
        choice = [value]
    if not choice:
        raise ConfigError([f"{key}={value}: no values to vary over"])
    if len({str(one) for one in choice}) < len(choice):
        raise ConfigError([f"{key}={value}: a value is there twice"])
    return choice


def expand(vary: Mapping[str, object], sample: int | None, sample_seed: int) -> list[Setting]:
    """The settings of all runs: every combination, or `sample` of them, each with every seed. Seeds of one setting are
    neighbours. Raises ConfigError."""
    choices = {key: parse_choice(key, value) for key, value in vary.items()}
    seeds = choices.pop(SEED, None)
    if isinstance(seeds, Distribution):
        raise ConfigError(["seed: give a list or a range, such as seed=0..7; every setting is run with each of them"])
    drawn = [key for key, choice in choices.items() if isinstance(choice, Distribution)]
    if drawn and sample is None:
        raise ConfigError([f"{drawn[0]} is a distribution: say how many settings to draw from it, as in --sample 16"])
    settings = _grid(choices) if sample is None else _sample(choices, sample, sample_seed)
    return [{**setting, **seed} for setting in settings for seed in ([{SEED: one} for one in seeds] if seeds else [{}])]


def setting_text(setting: Mapping[str, object]) -> str:
    """Writes a setting as on the command line: `optimizer.lr=0.001 seed=3`."""
    return " ".join(f"{key}={value}" for key, value in setting.items())


def without_seed(setting: Mapping[str, Any]) -> Setting:
    return {key: value for key, value in setting.items() if key != SEED}


def _grid(choices: Mapping[str, Choice]) -> list[Setting]:
    lists = [choice for choice in choices.values() if isinstance(choice, list)]
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*lists)]


def _sample(choices: Mapping[str, Choice], count: int, seed: int) -> list[Setting]:
    """Draw n is the same whatever the count. Settings that were drawn already are drawn again, as far as there are
    others."""
    found: dict[str, Setting] = {}
    for number in range(count * TRIES):
        if len(found) == count:
            break
        random_ = random.Random(f"{seed}/{number}")
        setting = {
            key: choice.draw(random_) if isinstance(choice, Distribution) else random_.choice(choice)
            for key, choice in choices.items()
        }
        found.setdefault(setting_text(setting), setting)
    return list(found.values())


def _is_varied(value: str) -> bool:
    if DRAWN.fullmatch(value.strip()) or RANGE.fullmatch(value.strip()):
        return True
    if "," not in value:
        return False
    try:
        return len(parse_yaml(f"[{value}]", value)) > 1
    except ConfigError:
        return False  # the config's own reader says what is wrong with it


def _expanded(part: object) -> list[Any]:
    if isinstance(part, str) and (found := RANGE.fullmatch(part.strip())):
        first, last = map(int, found.groups())
        return list(range(first, last + 1) if first <= last else range(first, last - 1, -1))
    return [part]


def _distribution(key: str, kind: str, low: str, high: str) -> Distribution:
    text = f"{key}={kind}({low},{high})"
    try:
        found = Distribution(kind, float(low), float(high))
    except ValueError:
        raise ConfigError([f"{text}: {kind} is given two numbers, as in {kind}(1,10)"]) from None
    if not found.low < found.high or (kind == "loguniform" and found.low <= 0):
        bounds = "above 0, the lower one first" if kind == "loguniform" else "with the lower one first"
        raise ConfigError([f"{text}: the bounds are two numbers {bounds}"])
    return found


def _rounded(value: float) -> float:
    """Four digits that people can read and type again."""
    return float(f"{value:.4g}")
