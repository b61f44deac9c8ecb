"""Adapters to other projects where those are not installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

ADAPTERS = [
    ("skyrl", "skyrl_gym", "pip install skyrl-gym"),
    ("cookbook", "tinker_cookbook", "pip install tinker-cookbook"),
    ("verifiers_env", "verifiers", r"pip install 'verifiers>=0\.4'"),
]


@pytest.mark.parametrize(("module", "package", "told"), ADAPTERS, ids=[one[0] for one in ADAPTERS])
def test_without_its_package_is_said_what_to_install(module: str, package: str, told: str):
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    with pytest.raises(ModuleNotFoundError, match=told):
        import_module(f"palestra.environments.fleet.{module}")
