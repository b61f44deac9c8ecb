"""`palestra view`: the dashboard over run folders."""

from __future__ import annotations

import secrets
import webbrowser
from pathlib import Path

import rich_click as click

from palestra.cli.output import USAGE, fail, needs_extra, one_line_errors
from palestra.cli.run.common import runs_option
from palestra.types.gym import GYM_HEAD


@click.command()
@click.argument("which", metavar="[RUN|FOLDER]", required=False)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen at; beyond this machine a key is needed."
)
@click.option("--port", type=int, default=8400, show_default=True, help="Port to listen at; 0 for any free port.")
@click.option("--open", "opens", is_flag=True, help="Open it in the browser.")
@click.option(
    "--key",
    metavar="KEY",
    envvar="PALESTRA_VIEW_KEY",
    show_envvar=True,
    help="Key that other machines must give. [beyond this machine: one is made]",
)
@click.option("--public-url", metavar="URL", help="Address by which browsers reach it through a proxy.")
@click.option("--gym", metavar="URL", default=GYM_HEAD, show_default=True, help="Head server of the gym that is shown.")
@runs_option
def view(
    which: str | None,
    host: str,
    port: int,
    opens: bool,
    key: str | None,
    public_url: str | None,
    gym: str,
    root: Path,
) -> None:
    """Show runs in the browser: curves, rollouts, tokens, live. RUN is one of them, by its name or its folder; another
    FOLDER of runs may be given in place of --runs."""
    with needs_extra("view"):
        from urllib.parse import quote, urlsplit

        from palestra.view.access import Access, is_local_address
        from palestra.view.serving import ViewError, serve

    folder = root if which is None else Path(which) if Path(which).is_dir() else root / which
    if not folder.is_dir() and which is not None:
        raise fail(f"no run {which!r} in {root}, and no such folder; to see the runs: palestra run list", USAGE)
    if not folder.is_dir():
        raise fail(f"no such folder: {folder}; to make a run in it: palestra train demo runs={folder}", USAGE)
    is_run = (folder / "config.json").is_file()
    root, page = (folder.absolute().parent, f"/runs/{quote(folder.absolute().name)}") if is_run else (folder, "/")
    is_new_key = key is None and not is_local_address(host)
    key = secrets.token_urlsafe(18) if is_new_key else key
    hosts = (name,) if public_url and (name := urlsplit(public_url).hostname) else ()

    def started(address: str) -> None:
        click.echo(f"{root}: {public_url or address}{page}")
        if is_new_key:
            click.echo(f"key: {key}")
        if opens:
            webbrowser.open(f"{address}{page}")

    with one_line_errors(ViewError):
        serve(root, host, port, Access(key, hosts), started, gym.rstrip("/"))
