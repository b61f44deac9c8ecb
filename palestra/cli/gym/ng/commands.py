"""The commands: `gym GROUP COMMAND`, and each by its old name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import rich_click as click

import palestra
from palestra.cli import main
from palestra.cli.gym.ng.command_map import ABSENT, COMMANDS, OLD_NAMES, CommandMapping
from palestra.cli.gym.ng.options import MappedOption
from palestra.cli.gym.ng.translating import arguments_of, collection_of, parameter_name
from palestra.cli.output import fail, one_line_errors
from palestra.gym.errors import GymConfigError
from palestra.util.json_types import JsonObject

GROUPS = {
    "env": "Develop and run environments.",
    "eval": "Run evaluations.",
    "dataset": "Manage datasets.",
    "list": "List what can be run.",
    "dev": "For contributors.",
}
ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def gym() -> None:
    """The entry point of `gym` and `ng`."""
    root()(prog_name=Path(sys.argv[0]).name)


def by_old_name() -> None:
    """The entry point of every `ng_*` and `nemo_gym_*`."""
    name = Path(sys.argv[0]).name.removeprefix("nemo_gym_").removeprefix("ng_")
    root()([*OLD_NAMES[name].split(), *sys.argv[1:]], prog_name="gym")


def root() -> click.Group:
    made = click.RichGroup(
        name="gym", help="NeMo Gym's commands, for Palestra's gym. Each is a name for a `palestra gym` command."
    )
    click.version_option(palestra.__version__, prog_name="palestra, with NeMo Gym's commands")(made)
    for name, about in GROUPS.items():
        made.add_command(click.RichGroup(name=name, help=about))
    for name, mapping in COMMANDS.items():
        _add(made, name, _mapped_command(name, mapping))
    for name, nearest in ABSENT.items():
        _add(made, name, _absent_command(name, nearest))
    return made


def _add(made: click.Group, name: str, command: click.Command) -> None:
    group = made.commands[name.split()[0]] if " " in name else made
    assert isinstance(group, click.Group)
    group.add_command(command)


def _mapped_command(name: str, mapping: CommandMapping) -> click.Command:
    options = [_parameter(option) for option in mapping.options]
    options.append(click.Option(["--verbose", "-v"], is_flag=True, expose_value=False, help="Nothing more is said."))
    run: Callable[..., None] = _run_evaluation if name == "eval run" else _run_mapped
    if name == "eval run":
        options.append(click.Option(["--no-serve"], is_flag=True, help="Address of a running gym."))
        options.append(click.Option(["--split"], help="Play this dataset of the configs, instead of --input."))

    def called(rest: tuple[str, ...], **typed: object) -> None:
        run(mapping, typed, rest)

    arguments = click.Argument(
        ["rest"], nargs=-1, metavar="[NAME] [KEY=VALUE]..." if mapping.names else "[KEY=VALUE]..."
    )
    about = f"{mapping.about}\n\nIt is `palestra {' '.join(mapping.ours)}`."
    return click.RichCommand(name=name.split()[-1], params=[*options, arguments], callback=called, help=about)


def _parameter(option: MappedOption) -> click.Option:
    names = [parameter_name(option), *option.names]
    return click.Option(names, is_flag=option.is_flag, multiple=option.is_multiple, help=option.about)


def _run_mapped(mapping: CommandMapping, typed: JsonObject, rest: tuple[str, ...]) -> None:
    with one_line_errors(GymConfigError):
        arguments = arguments_of(mapping, typed, rest)
    main([*mapping.ours, *arguments], prog_name="palestra")


def _run_evaluation(mapping: CommandMapping, typed: JsonObject, rest: tuple[str, ...]) -> None:
    with one_line_errors(GymConfigError):
        datasets, collect = collection_of(mapping, typed, rest)
    if datasets:
        main(["gym", "datasets", *datasets], prog_name="palestra", standalone_mode=False)
    main(["gym", "collect", *collect], prog_name="palestra")


def _absent_command(name: str, nearest: str) -> click.Command:
    def refuse() -> None:
        raise fail(f"`gym {name}` has no counterpart in Palestra; the nearest: {nearest}")

    about = f"Not supported; the nearest: {nearest}."
    return click.RichCommand(name=name.split()[-1], callback=refuse, context_settings=ANYTHING, help=about)
