"""`palestra env`: which environments there are, playing one oneself, auditing them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from palestra.cli.env_audit import audit
from palestra.cli.output import FAILED, NOT_FOUND, fail, one_line_errors, print_json
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from palestra.config.environment_entries import EnvironmentEntry
    from palestra.environments import EnvironmentSet
    from palestra.types.rollouts import Message, Task


@click.group()
def env() -> None:
    """List environments, play one yourself, or find what is wrong with one."""


env.add_command(audit)


@env.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def list_(as_json: bool) -> None:
    """List the environments that can be named in a config."""
    from palestra.environments.registry import names

    found = [_facts(name) for name in names()]
    if as_json:
        print_json(found)
        return
    width = max(len(one["name"]) for one in found)
    for one in found:
        tasks = (
            f"{one['train_tasks']} tasks, {one['eval_tasks']} held out" if one["train_tasks"] else "needs a task file"
        )
        click.echo(f"{one['name'].ljust(width)}  {one['about'] or one['problem']} ({tasks})")
    click.echo("your own environment is named package.module:Class (docs/environments.md)", err=True)


@env.command()
@click.argument("name")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--task", "task_id", metavar="ID", help="Id of the task. [a random held-out task]")
@click.option(
    "--tasks",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSONL file with the tasks. [the environment's own tasks]",
)
@click.option("--max-turns", type=click.IntRange(min=1), help="Maximum number of turns. [the environment's own]")
def play(name: str, settings: tuple[str, ...], task_id: str | None, file: Path | None, max_turns: int | None) -> None:
    """Play a task in place of the policy: each line you type is one message. KEY=VALUE are settings of the environment,
    its `config` in a run: args.max_terms=2."""
    from palestra.config.environment_entries import EnvironmentEntry
    from palestra.config.errors import ConfigError
    from palestra.config.load import Layers, merge_layers
    from palestra.environments import EnvironmentFailure, EnvironmentSet, TaskFileError, UnknownEnvironment
    from palestra.types.rollouts import is_verifiers

    with one_line_errors(ConfigError):
        config = merge_layers(Layers(), [], settings).data
    entry = EnvironmentEntry(name=name, tasks=file, max_turns=max_turns, config=config)
    with (
        one_line_errors(UnknownEnvironment, EnvironmentFailure),
        one_line_errors(TaskFileError, code=FAILED),
        EnvironmentSet([entry], env_threads=1, env_timeout_s=600) as environments,
    ):
        task = find_task(environments, name, task_id, with_eval=file is None)
        asyncio.run(_play_with_verifiers(entry, task) if is_verifiers(name) else _play(environments, task))


def _facts(name: str) -> JsonObject:
    """Describes environments; one that cannot be loaded is listed with the reason."""
    from palestra.environments.errors import TaskFileError
    from palestra.environments.registry import spec

    facts: JsonObject = {"name": name, "about": "", "train_tasks": 0, "eval_tasks": 0, "problem": None}
    try:
        env_class = spec(name).load()
        lines = (env_class.__doc__ or "").strip().splitlines()
        facts["about"] = lines[0] if lines else env_class.__name__
        tasks: Any = getattr(env_class, "tasks", None)
        if tasks is not None:
            facts |= {f"{split}_tasks": _count(tasks(split)) for split in ("train", "eval")}
    except TaskFileError as error:  # such as a benchmark's files, which are not here
        return facts | {"problem": str(error)}
    except Exception as error:  # boundary: an environment's own module; listed with the reason
        return facts | {"about": "", "problem": " ".join(f"{type(error).__name__}: {error}".split())}
    return facts


def _count(tasks: Iterable[Any]) -> int:
    """Makes no task, where their number is known without: some have a picture to draw."""
    return len(tasks) if isinstance(tasks, Sized) else sum(1 for _ in tasks)


def find_task(environments: EnvironmentSet, name: str, task_id: str | None, *, with_eval: bool) -> Task:
    """A task by its id, or a random one. Prints an error and exits if there is none."""
    splits = [
        tasks for split in ("eval", "train") for _, tasks in environments.tasks(split) if with_eval or split == "train"
    ]
    if task_id is None:
        return random.choice(splits[0])
    for task in (task for tasks in splits for task in tasks):
        if task.id == task_id:
            return task
    raise fail(f"{name} has no task {task_id!r}; its first task is {splits[0][0].id!r}", NOT_FOUND)


async def _play(environments: EnvironmentSet, task: Task) -> None:
    session = environments.open(task)
    try:
        messages = await session.init(task.prompt)
        click.echo(f"task {task.id}, at most {session.max_turns} turns; end with Ctrl-D", err=True)
        total = 0.0
        for turn in range(session.max_turns):
            _show(messages)
            if (typed := _typed()) is None:
                click.echo(f"\nthe input has ended after {turn} of {session.max_turns} turns", err=True)
                messages = []
                break
            result = await session.step(typed)
            messages, total = result.observations, total + (result.reward or 0.0)
            if result.done:
                break
        _show(messages)
        click.echo(f"reward {total:g}")
        for key, value in (await session.metrics()).items():
            click.echo(f"{key} {value:g}")
    finally:
        await session.close()


async def _play_with_verifiers(entry: EnvironmentEntry, task: Task) -> None:
    from palestra.rollouts.verifiers.by_hand import play_by_hand

    shown: list[Message] = []

    def ask(messages: Sequence[Message]) -> str:
        common = sum(1 for old, new in zip(shown, messages, strict=False) if old == new)
        _show([one for one in messages[common:] if one["role"] != "assistant"])
        shown[:] = messages
        return _typed() or ""

    outcome = await play_by_hand(entry, task, ask)
    if outcome.problem is not None:
        raise fail(f"{outcome.problem.type}: {outcome.problem.message}", FAILED)
    for agent, reward in {"": outcome.reward, **(outcome.agents or {})}.items():
        if reward is not None and (not agent or len(outcome.agents or {}) > 1):
            click.echo(f"reward {agent} {reward:g}".replace("  ", " "))
    for key, value in outcome.numbers.items():
        click.echo(f"{key} {value:g}")


def _typed() -> str | None:
    """Returns the line that is typed; None at the end of the input."""
    try:
        return click.prompt("assistant", prompt_suffix="> ", default="", show_default=False)
    except click.Abort as abort:
        if isinstance(abort.__context__, EOFError):
            return None
        raise


def _show(messages: list[Message]) -> None:
    for message in messages:
        click.echo(f"{message['role']}: {message['content']}")
