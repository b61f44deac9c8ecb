"""`palestra config`: what a command would run with, and every key there is."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.options import config_files
from palestra.cli.output import USAGE, fail, needs_extra, one_line_errors, print_json
from palestra.util.suggest import did_you_mean

if TYPE_CHECKING:
    from palestra.config import Config
    from palestra.config.train import RunConfig

# The commands and kinds of runs that take a config, and where its model is.
CONFIGS = {
    "serve": "palestra.config.serve:ServeConfig",
    **{kind: f"palestra.config.train:{kind.title()}Config" for kind in ("grpo", "distill", "sft", "dpo")},
    "eval": "palestra.config.evaluate:EvaluationConfig",
    "sweep": "palestra.config.sweep:SweepConfig",
}


@click.group()
def config() -> None:
    """Show a command's resolved config, or every key it knows; translate those of NeMo RL."""


@config.command()
@click.argument("command", metavar="COMMAND|CONFIG")
@config_files
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def show(command: str, files: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Print the config COMMAND would run with, as JSON; secrets are blacked out.

    COMMAND is serve, grpo, distill, sft, dpo, eval or sweep; CONFIG is what `palestra train` takes: a file, or the name
    of a bundled config.
    """
    from palestra.config import ConfigError, dump_config, load_config
    from palestra.config.serve import load_serve_config

    with one_line_errors(ConfigError):
        if command == "serve":
            config = load_serve_config(files, overrides)
        elif command in CONFIGS:
            config = load_config(find_config(command), files, overrides)
        else:
            config = load_named(command, files, overrides)
        click.echo(dump_config(config))


def load_named(name: str, files: tuple[str, ...], overrides: tuple[str, ...]) -> RunConfig:
    """Loads the config of a training run, given as for `palestra train`."""
    from palestra.config.bundled import bundled_configs, find_config_file
    from palestra.config.train import load_train_config

    try:
        file = find_config_file(name)
    except FileNotFoundError:
        hint = did_you_mean(name, [*CONFIGS, *bundled_configs()], otherwise="there are")
        raise fail(f"no command and no config file {name!r}; {hint}", USAGE) from None
    return load_train_config([file, *files], overrides)


@config.command()
@click.argument("command", type=click.Choice(sorted(CONFIGS)))
def schema(command: str) -> None:
    """Print the JSON Schema of COMMAND's config, for editors and readers."""
    print_json(find_config(command).model_json_schema())


@config.command("from-nemo-rl")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def from_nemo_rl(file: Path) -> None:
    """Translate a config of NeMo RL's that trains over NeMo Gym; print it as YAML for `palestra train`.

    What has no counterpart here is named, above the YAML and on stderr.
    """
    from palestra.config import ConfigError
    from palestra.config.load import Layers, validate
    from palestra.config.train import GrpoConfig

    with needs_extra("gym"):
        from palestra.gym.errors import GymConfigError
        from palestra.gym.nemo_rl.run_config import translated
        from palestra.gym.nemo_rl.run_config_file import read_nemo_rl_config
    with one_line_errors(ConfigError, GymConfigError):
        found = translated(read_nemo_rl_config(file))
        layers = Layers()
        layers.merge(found.config, str(file))
        validate(GrpoConfig, layers)
    click.echo(found.text(file.name), nl=False)
    for key, why in found.lost.items():
        click.echo(f"without a counterpart: {key}: {why}", err=True)
    places = dict.fromkeys(".".join(key.split(".")[:2]) for key in found.not_needed)
    if places:
        click.echo(f"not needed here ({len(found.not_needed)} keys): {', '.join(places)}", err=True)


def find_config(command: str) -> type[Config]:
    module, name = CONFIGS[command].split(":")
    return getattr(importlib.import_module(module), name)
