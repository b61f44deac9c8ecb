"""Plays the evaluations of `palestra eval` one after the other, and prints what came out."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.output import FAILED, INTERRUPTED, TOO_MANY_FAILED, UNREACHABLE, file_errors, print_json
from palestra.runs.control import short_name
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.config.evaluate import EvaluationConfig
    from palestra.evaluation.score_table import ScoredModel
    from palestra.runs.writer import RunFolder


def run_all(evaluations: list[tuple[EvaluationConfig, RunFolder]], key: str | None, as_json: bool) -> int:
    """Plays one evaluation after the other; one that cannot go on leaves all that come after it to `--resume`."""
    from palestra.evaluation.score_table import ScoredModel, scores_of, table_text

    again = "to go on: palestra eval " + " ".join(f"--resume {short_name(folder)}" for _, folder in evaluations)
    scored: list[ScoredModel] = []
    results: list[JsonObject] = []
    worst = 0
    for config, folder in evaluations:
        outcome = _run(config, folder, key, as_json, again)
        if isinstance(outcome, int):
            return outcome
        scores = scores_of(config, outcome)
        scored.append(ScoredModel(model=config.model, folder=str(folder.path), scores=scores))
        results.append({"model": config.model, "folder": str(folder.path), "metrics": outcome})
        if not as_json:
            click.echo(_closing_text(folder, outcome))
        if (failed := outcome["eval/failed_share"]) > config.max_failed:
            allowed = f"{config.max_failed:.1%} are allowed (--max-failed)"
            click.echo(f"error: {failed:.1%} of the rollouts failed, {allowed}; {again}", err=True)
            worst = TOO_MANY_FAILED
    if as_json:
        _print_results(results, scored)
    else:
        click.echo(table_text(scored))
    return worst


def _print_results(results: list[JsonObject], scored: list[ScoredModel]) -> None:
    import msgspec

    for result, one in zip(results, scored, strict=True):
        result["scores"] = msgspec.to_builtins(one.scores)
    print_json(results[0] if len(results) == 1 else {"evaluations": results})


def _run(config: EvaluationConfig, folder: RunFolder, key: str | None, as_json: bool, again: str) -> JsonObject | int:
    """Returns the metrics, or the exit code if it ended early."""
    from palestra.cli.progress_display import StepLines
    from palestra.evaluation.run import evaluate as play
    from palestra.net.chat_apis.errors import EndpointError
    from palestra.rollouts.policy_sampler import PolicyError
    from palestra.rollouts.sources import RolloutSourceError
    from palestra.runs.listener import Silence

    try:
        with file_errors(again), nullcontext(Silence()) if as_json else StepLines(0) as listener:
            return asyncio.run(play(config, folder, listener, key))["last"]
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo(f"stopped; {again}", err=True)
        return INTERRUPTED
    except (EndpointError, PolicyError, RolloutSourceError) as error:
        click.echo(f"error: {error}\n{again}", err=True)
        return UNREACHABLE if isinstance(error, ConnectionError) else FAILED


def _closing_text(folder: RunFolder, metrics: JsonObject) -> str:
    played, failed = round(metrics["eval/rollouts"]), round(metrics["eval/failed_share"] * metrics["eval/rollouts"])
    lines = [f"{played} rollouts of {metrics['eval/tasks']:.0f} tasks in {folder.path}, {failed} failed"]
    if "eval/success" in metrics:
        lines.append(f"success {metrics['eval/success']:.3f} ± {metrics['eval/success_stderr']:.3f}")
        lines += [
            f"{name.removeprefix('eval/').replace('_at_', '@')} {value:.3f}"
            for name, value in metrics.items()
            if name.startswith("eval/pass_at_")
        ]
        lines.append(f"reward {metrics['eval/reward_mean']:.3f} ± {metrics['eval/reward_stderr']:.3f}")
    if failed:
        why = f"palestra rollout list {short_name(folder)}"
        lines.append(f"{failed} of {played} rollouts failed and do not count; to see why: {why}")
    lines.append(f"{metrics['eval/prompt_tokens']:.0f} tokens read, {metrics['eval/sampled_tokens']:.0f} sampled")
    return "\n".join(lines)
