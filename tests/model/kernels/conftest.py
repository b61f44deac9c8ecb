"""Kernels run here through Triton's interpreter on a CPU, or for real where there is a GPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    return "cuda" if ON_GPU else "cpu"
