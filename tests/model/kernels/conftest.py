"""Kernels run here through Triton's interpreter on a CPU, or for real where there is a GPU.

The interpreter multiplies float16 as a GPU does, but not bfloat16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="make test installs Triton's interpreter")
ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def _patched_names_are_looked_up_once() -> None:
    """For each call of a device function Triton 3.9 looks through its whole language for what it has to interpret."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    if ON_GPU or not hasattr(interpreter, "_patch_builtin"):
        return

    @cache
    def names_in(place: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    def patch(place: Any, builder: Any, scope: Any) -> None:
        for name in names_in(place):
            if is_builtin(member := getattr(place, name)):
                interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch


@pytest.fixture
def device() -> str:
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def dtype() -> torch.dtype:
    return torch.bfloat16 if ON_GPU else torch.float16


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go through the kernels, too."""
    monkeypatch.setattr("palestra.model.kernels.interpreted", not ON_GPU)


@pytest.fixture
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """To the accuracy of the half type that was computed in, relative to the largest number."""

    def check(found: Tensor, expected: Tensor) -> None:
        error, size = (found.float() - expected.float()).abs().max(), expected.float().abs().max()
        tolerance = 2e-2 if ON_GPU else 3e-3
        assert error <= tolerance * size, f"off by {error} of {size}"

    return check
