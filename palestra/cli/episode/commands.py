"""`palestra episode`: what is queued, played, parked at a running server, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

from palestra.cli.lazy import LazyCommand, LazyGroup
from palestra.cli.options import renamed_option, server_options
from palestra.cli.output import one_line_errors, print_json, print_result
from palestra.cli.run.common import json_option, print_table
from palestra.config.redaction import Mask, redact
from palestra.util.figures import duration_text, number_text, time_text
from palestra.util.safe_text import safe_text

if TYPE_CHECKING:
    from rich.table import Table

    from palestra.episodes import EpisodeClient, PlayCounts
    from palestra.types.episodes import EpisodeInfo, RunInfo

F = TypeVar("F", bound=Callable[..., Any])

STATES = ["queued", "leased", "ended", "parked", "cancelled"]
PAGE = 1000
COUNTS = ("queued", "leased", "ended", "parked")


server_and_key = server_options(old="--url")


def player_options(command: F) -> F:
    """Adds the options that say which episodes a player takes, and when it stops."""
    for option in (
        click.option(
            "--wait",
            "run_wait_s",
            type=click.FloatRange(0),
            metavar="SECONDS",
            default=600.0,
            show_default=True,
            help="Seconds to wait for a run that does not exist yet.",
        ),
        click.option(
            "--idle", "idle_s", type=click.FloatRange(0), metavar="SECONDS", help="Stop when no episode is waiting."
        ),
        click.option("--max-episodes", type=click.IntRange(1), help="Stop after this number of episodes."),
        click.option("--kind", type=click.Choice(["train", "eval"]), help="Only episodes of this kind."),
    ):
        command = option(command)
    return command


def print_progress(counts: PlayCounts) -> None:
    if counts.playing:
        click.echo(str(counts))


def search_options(command: F) -> F:
    for option in (
        click.option("--task", metavar="TEXT", help="Only episodes whose task contains this text."),
        click.option("--error", metavar="TEXT", help="Only episodes whose error contains this text; '' for any error."),
        click.option("--reward-below", type=float, metavar="NUMBER", help="Only episodes with a lower reward."),
        click.option("--reward-min", type=float, metavar="NUMBER", help="Only episodes with at least this reward."),
    ):
        command = option(command)
    return command


run_option = click.option("--run", metavar="RUN", help="Only episodes of this run.")
state_option = renamed_option(
    "--in-state", "state", old="--state", type=click.Choice(STATES), help="Only episodes in this state."
)


@click.group(
    cls=LazyGroup,
    lazy=[
        LazyCommand("play", "palestra.cli.episode.play:play", "Play episodes with the environments of this machine."),
        LazyCommand("show", "palestra.cli.episode.show:show", "Show one episode and everything that happened in it."),
        LazyCommand("export", "palestra.cli.episode.show:export", "Write episodes as JSON lines."),
    ],
)
def episode() -> None:
    """Play, list, requeue and cancel the episodes of a running server."""


@episode.command("list")
@run_option
@state_option
@search_options
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Maximum number of episodes."
)
@click.option("--offset", type=click.IntRange(0), default=0, help="Number of episodes to skip at the beginning.")
@server_and_key
@json_option
def list_(
    run: str | None,
    state: str | None,
    limit: int,
    offset: int,
    server: str,
    key: str | None,
    as_json: bool,
    **which: Any,
) -> None:
    """List the episodes that are not committed yet."""
    with open_client(server, key) as client:
        found = client.episodes(run, state, limit=limit, offset=offset, **which)
    if as_json:
        print_json(Mask().of(plain(found)))
        return
    if not found.episodes:
        like = "like that" if any(value is not None for value in which.values()) else ""
        what = " ".join(filter(None, (state, "episodes", f"of run {run}" if run else "", like)))
        click.echo(f"no {what}" if not found.total else f"no more {what}: there are {found.total}")
        return
    print_table([["id", "run", "state", "try", "calls", "reward", "what"], *map(row, found.episodes)])
    if (end := offset + len(found.episodes)) < found.total:
        click.echo(f"… {end} of {found.total}; the next: --offset {end}")


@episode.command()
@click.argument("episode_ids", metavar="[EPISODE]...", nargs=-1)
@click.option("--run", metavar="RUN", help="Requeue all parked episodes of this run.")
@server_and_key
@json_option
def requeue(episode_ids: tuple[str, ...], run: str | None, server: str, key: str | None, as_json: bool) -> None:
    """Put parked episodes back into the queue, with as many attempts as new episodes have."""
    if bool(episode_ids) == (run is not None):
        raise click.UsageError("name the episodes, or give --run RUN for all parked episodes of a run")
    with open_client(server, key) as client:
        count, skipped = (client.requeue(episode_ids), 0) if run is None else requeue_parked(client, run)
    print_result(
        as_json,
        {"requeued": count, "skipped": skipped},
        f"{count} queued again" + (f"; {skipped} not, because their groups have ended" if skipped else ""),
    )


@episode.command()
@click.argument("episode_ids", metavar="[EPISODE]...", nargs=-1)
@click.option("--run", metavar="RUN", required=True, help="The run of the episodes.")
@click.option(
    "--group", "group_ids", multiple=True, metavar="GROUP", help="Cancel all episodes of this group; may be repeated."
)
@click.option("--all", "everything", is_flag=True, help="Cancel all groups of the run that are not complete yet.")
@click.option("--reason", default="cancelled by hand", show_default=True, help="The reason that players see.")
@server_and_key
@json_option
def cancel(
    episode_ids: tuple[str, ...],
    run: str,
    group_ids: tuple[str, ...],
    everything: bool,
    reason: str,
    server: str,
    key: str | None,
    as_json: bool,
) -> None:
    """Cancel episodes of a run, so that they are no longer played. An episode that is cancelled alone counts as lost in
    its group."""
    if everything == bool(episode_ids or group_ids):
        raise click.UsageError("name episodes or groups (--group GROUP), or give --all")
    with open_client(server, key) as client:
        groups = open_groups(client, run) if everything else list(group_ids)
        count = client.cancel(run, episode_ids=episode_ids, group_ids=groups, reason=reason)
    print_result(as_json, {"cancelled": count}, f"{count} cancelled")


@episode.command()
@click.argument("run", metavar="RUN")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@server_and_key
@json_option
def delete(run: str, yes: bool, server: str, key: str | None, as_json: bool) -> None:
    """Delete a run with all its episodes, including those that were not read. Players are informed."""
    with open_client(server, key) as client:
        info = client.run_info(run)
        if not yes:
            unread = f"{info.delivered - info.committed} groups that are not committed"
            play = f"{info.queued + info.leased} episodes that wait or are played"
            click.confirm(f"Delete run {safe_text(run, keep='')}, with {play}, and {unread}?", abort=True, err=True)
        count = client.delete_run(run)
    print_result(as_json, {"deleted": count}, f"run {safe_text(run, keep='')} deleted, with {count} episodes")


@episode.command()
@run_option
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two looks.",
)
@server_and_key
def watch(run: str | None, every_s: float, server: str, key: str | None) -> None:
    """Watch the counts of each run until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    seen = Pace()
    with open_client(server, key) as client, Live(console=Console(), auto_refresh=False) as live:
        try:
            while True:
                live.update(counts_now(client, run, seen), refresh=True)
                time.sleep(every_s)
        except KeyboardInterrupt:
            pass


@contextmanager
def open_client(server: str, key: str | None) -> Iterator[EpisodeClient]:
    from palestra.episodes import EpisodeClient, EpisodeClientError

    with one_line_errors(EpisodeClientError, ValueError), EpisodeClient(server, key, retry_s=0) as client:
        yield client


def all_of(client: EpisodeClient, run: str, state: str) -> list[EpisodeInfo]:
    found: list[EpisodeInfo] = []
    while page := client.episodes(run, state, limit=PAGE, offset=len(found)).episodes:
        found += page
    return found


def requeue_parked(client: EpisodeClient, run: str) -> tuple[int, int]:
    """Requeues one by one, because an episode whose group has ended is refused (409) and must not stop the others."""
    from palestra.episodes import EpisodeApiError

    count = skipped = 0
    for one in all_of(client, run, "parked"):
        try:
            count += client.requeue([one.episode_id])
        except EpisodeApiError as error:
            if error.status != 409:
                raise
            skipped += 1
    return count, skipped


def open_groups(client: EpisodeClient, run: str) -> list[str]:
    return list({one.group_id: None for state in ("queued", "leased") for one in all_of(client, run, state)})


def counts_now(client: EpisodeClient, run: str | None, seen: Pace) -> Table:
    """The counts of each run; while a server does not answer, the last ones with the error."""
    from palestra.episodes import ServerSilent

    try:
        runs = [client.run_info(run)] if run else client.runs()
    except ServerSilent as error:
        if not seen.runs:
            raise
        return counts_table(seen.runs, seen, str(error))
    seen.runs = runs
    return counts_table(runs, seen)


def row(one: EpisodeInfo) -> list[str]:
    reward = one.result.total if one.result else None
    cells = (one.episode_id, one.run, str(one.state), str(one.attempt), str(one.calls), number_text(reward), what(one))
    return [safe_text(redact(cell), keep="") for cell in cells]


def what(one: EpisodeInfo) -> str:
    """The state of an episode in a few words: its player, its loss or its error."""
    now = time.time()
    if one.state == "leased":
        since = duration_text(max(now - one.claimed_at, 0)) if one.claimed_at else "?"
        return f"{one.client_id}, for {since}"
    if one.result is not None and one.result.error is not None:
        return f"{one.result.error.type}: {one.result.error.message}"[:80]
    if one.losses:
        return f"lost {len(one.losses)}×, last: {one.losses[-1].reason}"[:80]
    return ""


def moment(seconds: float | None) -> str:
    return time_text(seconds) if seconds else ""


class Pace:
    """Episodes that ended per second, between two looks."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}
        self.runs: list[RunInfo] = []
        """The runs at the last look."""

    def of(self, one: RunInfo) -> float | None:
        now, before = time.monotonic(), self._seen.get(one.run)
        if before is None or now - before[0] >= 1:
            self._seen[one.run] = now, one.ended
        return None if before is None or now <= before[0] else (one.ended - before[1]) / (now - before[0])


def counts_table(runs: list[RunInfo], seen: Pace, caption: str | None = None) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "run", "weights", *COUNTS, "ended/s", "groups", "", caption=None if caption is None else Text(caption)
    )
    for one in runs:
        pace = seen.of(one)
        cells = [safe_text(one.run, keep=""), str(one.version), *(str(getattr(one, name)) for name in COUNTS)]
        cells += ["-" if pace is None else f"{max(pace, 0):.1f}", f"{one.committed} of {one.delivered}"]
        table.add_row(*map(Text, cells), Text("paused", "yellow") if one.is_paused else Text(""))
    return table


def plain(record: object) -> Any:
    import msgspec

    return msgspec.to_builtins(record)
