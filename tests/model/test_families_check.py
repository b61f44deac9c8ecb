"""The families of `families_check.py` on tiny models in the hub's layout: trainer, sampler and gradients."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    """It is a script: the folder of tests is no package."""
    spec = importlib.util.spec_from_file_location("families_check", Path(__file__).with_name("families_check.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


families_check = _load()


def test_qwen3_5_is_what_transformers_computes():
    verdict, notes = families_check.check("qwen3_5", seed=0, lora=True)
    assert verdict == "ok", notes


@pytest.mark.slow
def test_qwen3_moe_is_what_transformers_computes():
    verdict, notes = families_check.check("qwen3_moe_mixed", seed=0, lora=True)
    assert verdict == "ok", notes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", families_check.SUPPORTED)
def test_supported_family_is_what_transformers_computes(name, seed):
    verdict, notes = families_check.check(name, seed=seed, lora=True)
    assert verdict == "ok", notes


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in families_check.FAMILIES if name not in families_check.SUPPORTED])
def test_family_that_is_not_supported_yet_is_refused_by_name(name):
    verdict, notes = families_check.check(name, seed=0, lora=False)
    assert (verdict, families_check.FAMILIES[name].cls in notes) == ("unsupported", True)
