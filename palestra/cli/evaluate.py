"""`palestra eval`: models, anywhere, on the tasks of environments and benchmarks."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.evaluation_runs import run_all
from palestra.cli.options import renamed_option, server_options
from palestra.cli.output import (
    FAILED,
    USAGE,
    fail,
    needs_extra,
    one_line_errors,
    print_json,
)
from palestra.types.rollouts import CODING
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.config.evaluate import EvaluationConfig
    from palestra.runs.writer import RunFolder

FILES = (".yaml", ".yml", ".json")
SETTING = re.compile(r"[\w.]+=")
LIST = "list"


@click.command()
@click.argument("arguments", nargs=-1, metavar="[list|BENCHMARK|ENV|CONFIG|gym:NAME|FILE]... [KEY=VALUE]...")
@click.option(
    "--model",
    "models",
    multiple=True,
    help="Model at the server, a model folder or Hugging Face id, or RUN, RUN@STEP, RUN@best, RUN@last. Several are "
    "evaluated one after the other and shown in one table.",
)
@server_options(
    help="Any model endpoint: ours, OpenAI's, Anthropic's, vLLM's. [one is started]",
    default=None,
    envvar=None,
    key_envvar="OPENAI_API_KEY",
)
@click.option("--agent", metavar="NAME", help="Command-line agent that plays coding tasks (palestra agent list).")
@click.option("--data", multiple=True, metavar="NAME=PATH", help="File or folder of a benchmark. [the hub's cache]")
@click.option(
    "--grader", multiple=True, metavar="NAME=PYTHON", help="Python that has a benchmark's grader. [palestra eval list]"
)
@click.option("--samples", type=int, help="Samples of each task; pass@k is reported up to this k.")
@renamed_option("--limit", "tasks", old="--tasks", type=int, help="Maximum number of tasks of each environment.")
@click.option(
    "--max-failed",
    type=float,
    metavar="SHARE",
    help="If more than this share of the rollouts failed, the exit code is 5. [0.5]",
)
@click.option(
    "--name",
    help="Name of the evaluation's folder in `runs`; of several models, what each name begins with. [two words]",
)
@click.option("--resume", multiple=True, metavar="RUN", help="Play what is left of this evaluation; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON.")
def evaluate(
    arguments: tuple[str, ...],
    models: tuple[str, ...],
    key: str | None,
    agent: str | None,
    data: tuple[str, ...],
    grader: tuple[str, ...],
    name: str | None,
    resume: tuple[str, ...],
    as_json: bool,
    **flags: str | float | None,
) -> None:
    """Evaluate models on benchmarks or on the held-out tasks of environments.

    BENCHMARK is one of `palestra eval list`, which says what each needs, ENV an environment (`palestra env list`),
    CONFIG the YAML file of a training run, whose environments and evaluation settings are used, gym:NAME a resources
    server of a gym with its agent and rows, platform:APP an app of the local platform, FILE a JSONL or Parquet file of
    prompts with answers. With --agent, FILE is a folder of coding tasks; without one, those that ship are played. Any
    setting can be given as KEY=VALUE; `palestra config schema eval` lists them all.
    The result is a folder like a training run's: palestra run show, compare and rollout list read it.
    """
    if arguments == (LIST,):
        _list(as_json)
        return
    overrides = [argument for argument in arguments if SETTING.match(argument)]
    names = [argument for argument in arguments if argument not in overrides]
    overrides += [f"{flag}={value}" for flag, value in flags.items() if value is not None]
    if agent is not None:
        names = names or ([] if resume else [CODING])
    if resume and (name or (len(resume) > 1 and models)):
        raise fail("--resume continues evaluations of models; --name and several --model are for new ones", USAGE)
    with needs_extra("train"):
        from palestra.checkpoints import CheckpointError
        from palestra.config import ConfigError
        from palestra.endpoints.models import check_name
        from palestra.environments import TaskFileError
        from palestra.evaluation.run import check_tasks, model_place, open_environments
        from palestra.evaluation.targets import default_agent, folder_names
        from palestra.rollouts.sources import RolloutSourceError
        from palestra.runs.reader import RunError
    is_named = any(text.startswith("agent.command=") for text in overrides)
    if (agent := agent or (None if is_named else default_agent(names))) is not None:
        overrides.append(f"agent.command={json.dumps([agent])}")
    with one_line_errors(ConfigError, RunError), one_line_errors(TaskFileError, code=FAILED):
        chosen = [[f"model={model}"] for model in models] or [[]]
        called = [[f"name={folder}"] if folder else [] for folder in folder_names(name, models)]
        named = [[*overrides, *one, *folder] for one, folder in zip(chosen, called, strict=True)]
        parts = [(named[0], one) for one in resume] or [(one, None) for one in named]
        configs = [_load(names, settings, which, data, grader) for settings, which in parts]
    with one_line_errors(ValueError, CheckpointError), one_line_errors(TaskFileError, RolloutSourceError, code=FAILED):
        for config in configs if resume else configs[:1]:
            with open_environments(config) as environments:
                check_tasks(config, environments)
        for config in configs:
            check_name(config.model, model_place(config, key))
    with ExitStack() as stack:
        with one_line_errors(RunError):
            opened = [stack.enter_context(_open_folder(config, bool(resume), key)) for config in configs]
        code = run_all(list(zip(configs, opened, strict=True)), key, as_json)
    raise SystemExit(code)


def _list(as_json: bool) -> None:
    import msgspec

    from palestra.evaluation.benchmark_list import list_benchmarks

    found = list_benchmarks()
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    width = max(len(one.name) for one in found)
    for one in found:
        click.echo(f"{one.name.ljust(width)}  {one.about}")
        lines = [f"graded by {one.grader}", *([f"found: {one.data}"] if one.data else []), *one.missing]
        for line in "\n".join(lines).splitlines():
            click.echo(f"{' ' * width}  {line.strip()}")


def _load(
    names: list[str], overrides: list[str], resume: str | None, data: tuple[str, ...], graders: tuple[str, ...]
) -> EvaluationConfig:
    from palestra.config.evaluate import load_evaluation_config
    from palestra.evaluation.targets import benchmark_defaults, entries_named
    from palestra.runs.control import saved_to_resume
    from palestra.runs.reader import RunError

    saved: JsonObject | None = None
    if resume is not None:
        found, saved = saved_to_resume(resume, overrides)
        if found.read_about()["kind"] != "eval":
            raise RunError(f"{resume} is no evaluation; to continue a training run: palestra train --resume {resume}")
    files = [name for name in names if name.endswith(FILES)]
    others = [name for name in names if name not in files]
    defaults = {} if files or saved else benchmark_defaults(others, overrides)
    return load_evaluation_config(entries_named(others, data, graders), files, overrides, saved, defaults)


def _open_folder(config: EvaluationConfig, is_resumed: bool, key: str | None) -> RunFolder:
    from palestra.evaluation.run import checkpoint_facts
    from palestra.runs.writer import RunFolder

    if not is_resumed:
        return RunFolder.create(config.runs, config.name, config, checkpoint_facts(config, key))
    return RunFolder.open(config.runs / (config.name or ""))
