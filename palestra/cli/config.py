"""`palestra config`: what a command would run with, and every key there is.

Owns: showing. Never touches: what the keys mean.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.options import config_files
from palestra.cli.output import one_line_errors, print_json

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
    """Show a command's resolved config, or every key it knows."""


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


def find_config(command: str) -> type[Config]:
    module, name = CONFIGS[command].split(":")
    return getattr(importlib.import_module(module), name)
