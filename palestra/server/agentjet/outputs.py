"""Converts AgentJet's results to ours, and back."""

from __future__ import annotations

import math

from msgspec import to_builtins

from palestra.server.core.errors import Refusal
from palestra.types.episodes import EpisodeResult, GroupState, PlayedGroup
from palestra.types.tinkerscript import WorkflowOutput
from palestra.util.json_types import JsonObject

METRICS = "tinkerscript/log_metrics"
"""Key in the metadata: logged metrics that are more than numbers by name."""


def result_of(output: WorkflowOutput) -> EpisodeResult:
    """Converts a result. 400 without a reward, so that the client hears of it and not its trainer."""
    metrics: dict[str, float] = {}
    is_plain = _flatten(output.log_metrics, "", metrics)
    metadata = output.metadata if is_plain else {**output.metadata, METRICS: output.log_metrics}
    steps = output.reward if isinstance(output.reward, list) else []
    return EpisodeResult(
        reward=None if steps else _reward(output),
        step_rewards=steps,
        is_success=output.is_success,
        metrics=metrics,
        metadata=metadata,
    )


def output_of(group: PlayedGroup) -> WorkflowOutput:
    """Returns the output of a group of one episode. A failed episode has no reward: AgentJet's trainer then plays its
    task again."""
    if group.state is GroupState.DROPPED or not group.episodes:
        return _failed("dropped", group.reason)
    (episode,) = group.episodes
    result = episode.info.result
    assert result is not None
    if result.error is not None:
        return _failed(result.error.type, result.error.message)
    metadata = {name: value for name, value in result.metadata.items() if name != METRICS}
    if result.step_rewards:
        metadata["step_rewards"] = result.step_rewards
    metadata["trajectories"] = to_builtins(episode.trajectories)
    return WorkflowOutput(
        reward=_total(result),
        is_success=result.is_success,
        metadata=metadata,
        log_metrics=result.metadata.get(METRICS, result.metrics),
    )


def _reward(output: WorkflowOutput) -> float:
    if isinstance(output.reward, float | int):
        return output.reward
    if output.reward is None and output.is_success is not None:
        return float(output.is_success)
    detail = "workflow_output.reward is missing, but an episode without one cannot be trained on"
    raise Refusal(400, f"{detail}; give a number, a list with one for each step, or at least is_success")


def _total(result: EpisodeResult) -> float:
    """Returns one number: a trainer of AgentJet's cannot read a list."""
    if result.reward is not None:
        return result.reward
    return sum(result.step_rewards) if result.step_rewards else sum(result.agent_rewards.values())


def _failed(kind: str, message: str) -> WorkflowOutput:
    return WorkflowOutput(is_success=False, metadata={"error": {"type": kind, "message": message}})


def _flatten(values: JsonObject, above: str, metrics: dict[str, float]) -> bool:
    """Collects numbers by their path, lists of them by their mean. Returns False if there are other values."""
    is_plain = not above
    for name, value in values.items():
        path = f"{above}/{name}" if above else name
        if _is_number(value):
            metrics[path] = float(value)
        elif isinstance(value, dict):
            _flatten(value, path, metrics)
            is_plain = False
        else:
            if isinstance(value, list) and value and all(map(_is_number, value)):
                metrics[path] = sum(value) / len(value)
            is_plain = False
    return is_plain


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
