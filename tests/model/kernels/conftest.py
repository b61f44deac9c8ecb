"""Kernels run here through Triton's interpreter on a CPU, or for real where there is a GPU.

The interpreter multiplies float16 as a GPU does, but not bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="make test installs Triton's interpreter")
ON_GPU = torch.cuda.is_available()


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
