"""`palestra eval`: a model, anywhere, on the tasks of environments.

Owns: arguments, the evaluation's folder, exit codes. Never touches: playing.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import nullcontext
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.options import renamed_option, server_options
from palestra.cli.output import (
    FAILED,
    INTERRUPTED,
    TOO_MANY_FAILED,
    UNREACHABLE,
    USAGE,
    fail,
    file_errors,
    needs_extra,
    one_line_errors,
    print_json,
)
from palestra.runs.control import short_name
from palestra.types.rollouts import CODING
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.config.evaluate import EvaluationConfig
    from palestra.runs.writer import RunFolder

FILES = (".yaml", ".yml", ".json")
SETTING = re.compile(r"[\w.]+=")


@click.command()
@click.argument("arguments", nargs=-1, metavar="[ENV|CONFIG|gym:NAME|FILE]... [KEY=VALUE]...")
@click.option(
    "--model", help="Model at the server, a model folder or Hugging Face id, or RUN, RUN@STEP, RUN@best, RUN@last."
)
@server_options(
    help="Any model endpoint: ours, OpenAI's, Anthropic's, vLLM's. [one is started]",
    default=None,
    envvar=None,
    key_envvar="OPENAI_API_KEY",
)
@click.option("--agent", metavar="NAME", help="Command-line agent that plays coding tasks (palestra agent list).")
@click.option("--samples", type=int, help="Samples of each task; pass@k is reported up to this k.")
@renamed_option("--limit", "tasks", old="--tasks", type=int, help="Maximum number of tasks of each environment.")
@click.option(
    "--max-failed",
    type=float,
    metavar="SHARE",
    help="If more than this share of the rollouts failed, the exit code is 5. [0.5]",
)
@click.option("--name", help="Name of the evaluation's folder in `runs`. [two words]")
@click.option("--resume", metavar="RUN", help="Play what is left of this evaluation.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON.")
def evaluate(
    arguments: tuple[str, ...],
    key: str | None,
    agent: str | None,
    resume: str | None,
    as_json: bool,
    **flags: str | float | None,
) -> None:
    """Evaluate a model on the held-out tasks of environments.

    ENV is an environment (`palestra env list`), CONFIG the YAML file of a training run, whose environments and
    evaluation settings are used, gym:NAME a resources server of a gym with its agent and rows, platform:APP an app of
    the local platform, FILE a JSONL or Parquet file of prompts with answers. With --agent, FILE is a folder of coding
    tasks; without one, those that ship are played. Any setting can be given as KEY=VALUE; `palestra config schema eval`
    lists them all.
    The result is a folder like a training run's: palestra run show, compare and rollout list read it.
    """
    overrides = [argument for argument in arguments if SETTING.match(argument)]
    names = [argument for argument in arguments if argument not in overrides]
    overrides += [f"{name}={value}" for name, value in flags.items() if value is not None]
    if agent is not None:
        overrides.append(f"agent.command={json.dumps([agent])}")
        names = names or ([] if resume else [CODING])
    if resume and flags["name"]:
        raise fail("--resume continues an evaluation; --name is for a new one", USAGE)
    with needs_extra("train"):
        from palestra.checkpoints import CheckpointError
        from palestra.config import ConfigError
        from palestra.endpoints.models import check_name
        from palestra.environments import TaskFileError
        from palestra.evaluation.run import check_tasks, model_place, open_environments
        from palestra.rollouts.sources import RolloutSourceError
        from palestra.runs.reader import RunError
    with one_line_errors(ConfigError, RunError):
        config = _load(names, overrides, resume)
    with one_line_errors(ValueError, CheckpointError), one_line_errors(TaskFileError, RolloutSourceError, code=FAILED):
        with open_environments(config) as environments:
            check_tasks(config, environments)
        check_name(config.model, model_place(config, key))
    with one_line_errors(RunError):
        folder = _open_folder(config, resume)
    with folder:
        raise SystemExit(_run(config, folder, key, as_json))


def _load(names: list[str], overrides: list[str], resume: str | None) -> EvaluationConfig:
    from palestra.config.evaluate import load_evaluation_config
    from palestra.evaluation.named import entry_named
    from palestra.runs.control import saved_to_resume
    from palestra.runs.reader import RunError

    saved: JsonObject | None = None
    if resume is not None:
        found, saved = saved_to_resume(resume, overrides)
        if found.read_about()["kind"] != "eval":
            raise RunError(f"{resume} is no evaluation; to continue a training run: palestra train --resume {resume}")
    files = [name for name in names if name.endswith(FILES)]
    entries = [entry_named(name) for name in names if name not in files]
    return load_evaluation_config(entries, files, overrides, saved)


def _open_folder(config: EvaluationConfig, resume: str | None) -> RunFolder:
    from palestra.runs.writer import RunFolder

    if resume is None:
        return RunFolder.create(config.runs, config.name, config)
    return RunFolder.open(config.runs / (config.name or ""))


def _run(config: EvaluationConfig, folder: RunFolder, key: str | None, as_json: bool) -> int:
    from palestra.cli.progress_display import StepLines
    from palestra.evaluation.run import evaluate as play
    from palestra.net.chat_apis.errors import EndpointError
    from palestra.rollouts.policy_sampler import PolicyError
    from palestra.rollouts.sources import RolloutSourceError
    from palestra.runs.listener import Silence

    again = f"to go on: palestra eval --resume {short_name(folder)}"
    try:
        with file_errors(again), nullcontext(Silence()) if as_json else StepLines(0) as listener:
            summary = asyncio.run(play(config, folder, listener, key))
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo(f"stopped; {again}", err=True)
        return INTERRUPTED
    except (EndpointError, PolicyError, RolloutSourceError) as error:
        click.echo(f"error: {error}\n{again}", err=True)
        return UNREACHABLE if isinstance(error, ConnectionError) else FAILED
    if as_json:
        print_json({"folder": str(folder.path), "metrics": summary["last"]})
    else:
        click.echo(_closing_words(folder, summary["last"]))
    failed = summary["last"]["eval/failed_share"]
    if failed <= config.max_failed:
        return 0
    allowed = f"{config.max_failed:.1%} are allowed (--max-failed)"
    click.echo(f"error: {failed:.1%} of the rollouts failed, {allowed}; {again}", err=True)
    return TOO_MANY_FAILED


def _closing_words(folder: RunFolder, metrics: JsonObject) -> str:
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
