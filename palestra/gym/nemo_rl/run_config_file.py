"""Reads a config of NeMo RL's: the files that it builds on, and what stands in `${…}`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from palestra.config.load import read_file
from palestra.gym.config.merging import merged
from palestra.gym.errors import GymConfigError
from palestra.util.json_types import JsonObject

RESOLVERS: dict[str, Callable[..., Any]] = {
    "add": lambda one, other: one + other,
    "mul": lambda one, other: one * other,
    "div": lambda one, other: one / other,
    "max": lambda *numbers: max(numbers),
}
"""Functions of NeMo RL's in `${…}`."""


def read_nemo_rl_config(file: Path) -> JsonObject:
    """Reads a config with the files that it builds on (`defaults`), and fills in `${…}`. Raises GymConfigError and
    ConfigError."""
    with warnings.catch_warnings():  # newer versions call it otherwise; under that name, older ones mean something else
        warnings.simplefilter("ignore")
        for name, function in RESOLVERS.items():
            OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        found = OmegaConf.to_container(OmegaConf.create(_inherited(file, ())), resolve=True)
    except OmegaConfBaseException as error:
        raise GymConfigError(f"{file}: {str(error).splitlines()[0]}") from None
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _inherited(file: Path, below: tuple[Path, ...]) -> JsonObject:
    if file.resolve() in below:
        raise GymConfigError(f"{file}: its defaults lead back to itself")
    own = read_file(file)
    named = own.pop("defaults", [])
    parents = [named] if isinstance(named, str) else named
    whole: JsonObject = {}
    for one in [*(_inherited(file.parent / name, (*below, file.resolve())) for name in parents), own]:
        replaced = [key for key, value in one.items() if isinstance(value, dict) and value.pop("_override_", False)]
        whole = merged({key: value for key, value in whole.items() if key not in replaced}, one)
    return whole
