"""Computes how many runs of a sweep fit into the memory of the server that they share."""

from __future__ import annotations

from palestra.config.load import Override
from palestra.config.serve import load_serve_config
from palestra.memory_plan.model_plan import adapter_bytes
from palestra.memory_plan.serve_plan import plan_serving
from palestra.model.loading.spec import ModelSpec
from palestra.model.lora.layout import Layout
from palestra.types import LoraConfig

PUBLISHED = 4
"""Bytes for each number of an adapter that was published for sampling, while the next step trains."""


def runs_that_fit(folder: str, device: str, weights: str | None, rank: int, runs: int) -> int:
    """Returns how many runs fit, at least 1: whether a single one fits is checked when its server starts. `rank` is the
    largest one's."""
    settings: list[str | Override] = [Override("models", [{"path": folder, "device": device}], "--model")]
    if weights is not None:
        settings.append(Override("models.0.weights", weights, "--weights"))
    (model,) = load_serve_config([], settings).models
    plan = plan_serving([model])
    (used,) = plan.ranks  # it has one adapter already
    spec = ModelSpec.from_folder(model.path)
    each = adapter_bytes(spec, rank, 2) + PUBLISHED * Layout.of(spec, LoraConfig(rank=rank)).size
    left = plan.memory[used.device] - used.total_bytes
    return min(runs, 1 + max(0, left) // each)
