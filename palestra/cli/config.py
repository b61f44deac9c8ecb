"""`palestra config`: what a command would run with, and every key there is.

Owns: showing. Never touches: what the keys mean.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.options import config_files
from palestra.cli.output import needs_extra, one_line_errors, print_json

if TYPE_CHECKING:
    from palestra.config import Config

# The commands and kinds of runs that take a config, and where its model is.
CONFIGS = {
    "serve": "palestra.config.serve:ServeConfig",
    **{kind: f"palestra.config.train:{kind.title()}Config" for kind in ("grpo", "distill", "sft", "dpo")},
    "eval": "palestra.config.evaluate:EvaluationConfig",
}
COMMAND = click.argument("command", type=click.Choice(sorted(CONFIGS)))


@click.group()
def config() -> None:
    """Show a command's resolved config, or every key it knows; translate those of NeMo RL."""


@config.command()
@COMMAND
@config_files
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def show(command: str, files: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Print the config COMMAND would run with, as JSON; secrets are blacked out."""
    from palestra.config import ConfigError, dump_config, load_config
    from palestra.config.serve import load_serve_config

    with one_line_errors(ConfigError):
        if command == "serve":
            config = load_serve_config(files, overrides)
        else:
            config = load_config(find_config(command), files, overrides)
        click.echo(dump_config(config))


@config.command()
@COMMAND
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
