"""Metrics over many episodes of Fleet tasks, for each app and for all."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.util.json_types import JsonMapping

INIT_FAILED = "env_init_failed"
Metrics = JsonMapping


def aggregate_metrics(metrics: Sequence[Metrics]) -> dict[str, float]:
    """Aggregates metrics. Episodes that never began have `env_init_failed` and `env_init_failed/{app}`, and are counted
    separately."""
    if not metrics:
        return {}
    failed = [one for one in metrics if INIT_FAILED in one]
    played = [one for one in metrics if INIT_FAILED not in one]
    found: dict[str, float] = {}
    for app in sorted({_app_of(one) for one in played} - {""}):
        own = [one for one in played if _app_of(one) == app]
        found |= {f"{app}/{name}": value for name, value in _of_one(own).items()}
        found[f"{app}/num_episodes"] = len(own)
    for one in failed:
        for name, value in one.items():
            if name.startswith(f"{INIT_FAILED}/"):
                key = f"{name.removeprefix(f'{INIT_FAILED}/')}/{INIT_FAILED}"
                found[key] = found.get(key, 0) + value
    if played:
        found |= {name: value for name, value in _of_one(played).items() if name not in ("min_turns", "max_turns")}
    if failed:
        found[f"total_{INIT_FAILED}"] = sum(one[INIT_FAILED] for one in failed)
    return found | {"total_episodes": len(played)}


def _app_of(one: Metrics) -> str:
    """Returns the app: training keeps the numbers of an episode, and has the app as its `data_source`."""
    return str(one.get("env_key") or one.get("data_source") or "")


def _of_one(episodes: Sequence[Metrics]) -> dict[str, float]:
    turns, calls, errors = ([one.get(name, 0) for one in episodes] for name in ("turns", "tool_calls", "tool_errors"))
    count = len(episodes)
    found: dict[str, float] = {
        "avg_turns": sum(turns) / count,
        "min_turns": min(turns),
        "max_turns": max(turns),
        "avg_tool_calls": sum(calls) / count,
        "tool_calls_per_turn": sum(calls) / sum(turns) if sum(turns) else 0.0,
        "avg_tool_errors": sum(errors) / count,
        "total_tool_errors": sum(errors),
        "tool_error_rate": sum(errors) / sum(calls) if sum(calls) else 0.0,
    }
    for name in ("parse_error", "unknown_reward"):
        if any(name in one for one in episodes):
            found[f"{name}_rate"] = sum(one.get(name, 0) for one in episodes) / count
    return found
