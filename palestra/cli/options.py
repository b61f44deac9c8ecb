"""Options that mean the same in every command: which server, the key to it, config files. Old names of options still
work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import rich_click as click
from click.core import ParameterSource

from palestra.util.amounts import parse_duration

F = TypeVar("F", bound=Callable[..., Any])


def server_options(
    *,
    help: str = "Address of a running server.",  # noqa: A002
    default: str | None = "http://127.0.0.1:8000",
    envvar: str | None = "TINKER_BASE_URL",
    key_envvar: str = "TINKER_API_KEY",
    old: str | None = None,
) -> Callable[[F], F]:
    """`--server` and `--key`: they arrive as `server` and `key`. `old` is what `--server` was called before."""

    def added(command: F) -> F:
        command = click.option(
            "--key", metavar="KEY", envvar=key_envvar, show_envvar=True, help="API key, if the server needs one."
        )(command)
        shown: dict[str, Any] = {"metavar": "URL", "envvar": envvar, "show_envvar": True, "help": help}
        shown |= {"default": default, "show_default": default is not None, "callback": _started}
        if old is not None:
            return renamed_option("--server", old=old, **shown)(command)
        return click.option("--server", **shown)(command)

    return added


def _started(ctx: click.Context, _param: click.Parameter, server: str | None) -> str | None:
    """The address, when the server there has started."""
    if server is not None and not ctx.resilient_parsing:
        from palestra.cli.await_server import wait_for_start

        wait_for_start(server)
    return server


config_files = click.option(
    "-c",
    "--config",
    "files",
    multiple=True,
    metavar="FILE",
    help="YAML or JSON file; may be repeated, later files win.",
)


class Duration(click.ParamType):
    """A duration such as 30m, 12h or 30d, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else parse_duration(str(value))
        except ValueError as e:
            self.fail(str(e), param, ctx)


class RenamedOption(click.RichOption):
    """An option that is also accepted under its old name, which is not in the help and prints a warning."""

    def __init__(self, *args: Any, old: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.old = old

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        if (given := _hidden_name(self.old)) in opts:
            warn_of_old_name(self.old, self.opts[0])
            opts = {str(self.name): opts[given], **opts}
        return super().consume_value(ctx, opts)


def renamed_option(*names: str, old: str, **attributes: Any) -> Callable[[F], F]:
    """`click.option` with an old name."""
    shape = {key: attributes[key] for key in ("is_flag", "multiple") if key in attributes}
    hidden = click.option(old, _hidden_name(old), hidden=True, expose_value=False, **shape)
    shown = click.option(*names, cls=RenamedOption, old=old, **attributes)
    return lambda command: shown(hidden(command))


def _hidden_name(old: str) -> str:
    return "old_" + old.removeprefix("--").replace("-", "_")


def warn_of_old_name(old: str, new: str) -> None:
    click.echo(f"warning: {old} is now called {new}; the old name will be removed", err=True)
