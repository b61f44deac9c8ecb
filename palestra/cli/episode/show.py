"""`palestra episode show` and `export`: what happened in episodes, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import rich_click as click

from palestra.cli.episode.commands import (
    moment,
    open_client,
    plain,
    run_option,
    search_options,
    server_and_key,
    state_option,
)
from palestra.cli.output import one_line_errors, print_json
from palestra.cli.run.common import json_option
from palestra.util.figures import duration_text, number_text
from palestra.util.safe_text import safe_text

if TYPE_CHECKING:
    from palestra.config.redaction import Mask
    from palestra.types.timelines import AttemptTimeline, CallSpan, EpisodeTimeline, ToolSpan

LINE = 160
"""Characters of a text that are shown without --full."""

mask_option = click.option(
    "--mask",
    "patterns",
    multiple=True,
    metavar="REGEX",
    help="Black out text that matches this regular expression; may be repeated. Keys are always blacked out.",
)


@click.command()
@click.argument("episode_id", metavar="EPISODE")
@click.option("--full", is_flag=True, help="Show whole messages, not only their beginnings.")
@mask_option
@server_and_key
@json_option
def show(episode_id: str, full: bool, patterns: tuple[str, ...], server: str, key: str | None, as_json: bool) -> None:
    """Show one episode: its attempts with their model calls and tools, its losses, its result."""
    mask = mask_of(patterns)
    with open_client(server, key) as client:
        found = mask.of(client.timeline(episode_id))  # before anything is cut: half a secret fits no pattern
    if as_json:
        shown_episode = plain(found)
        print_json({**shown_episode.pop("episode"), **shown_episode})
        return
    for name, text in facts(found).items():
        if text:
            click.echo(f"{name:<12}{safe_text(text, keep='')}")
    for line in timeline_lines(found, full=full):
        click.echo(safe_text(line))


@click.command()
@run_option
@state_option
@search_options
@click.option("--limit", type=click.IntRange(1), help="Maximum number of episodes. [all]")
@click.option("-o", "--output", "file", type=click.File("wb", lazy=True), default="-", help="File to write. [stdout]")
@mask_option
@server_and_key
def export(
    run: str | None,
    state: str | None,
    limit: int | None,
    file: BinaryIO,
    patterns: tuple[str, ...],
    server: str,
    key: str | None,
    **which: Any,
) -> None:
    """Write episodes as JSON lines: each with its task, its messages, its tools and its result."""
    import msgspec

    mask, count = mask_of(patterns), 0
    with open_client(server, key) as client:
        for one in client.export(run, state, limit=limit, **which):
            file.write(msgspec.json.encode(mask.of(one)) + b"\n")
            count += 1
    click.echo(f"{count} written", err=True)


def mask_of(patterns: tuple[str, ...]) -> Mask:
    from palestra.config.redaction import Mask

    with one_line_errors(ValueError):
        return Mask(patterns)


def facts(found: EpisodeTimeline) -> dict[str, str]:
    one, task = found.episode, found.task
    result = one.result
    fields = {
        "episode": f"{one.episode_id}, index {one.index} in group {one.group_id}",
        "run": f"{one.run} ({one.kind})",
        "task": f"{task.id} of {task.environment}",
        "state": f"{one.state}, attempt {one.attempt}, {one.calls} model calls, {one.sampled_tokens} tokens sampled",
        "seed": str(one.seed),
        "created": moment(one.created_at),
        "claimed": f"{moment(one.claimed_at)} by {one.client_id}" if one.claimed_at else "",
        "lease until": moment(one.expires_at) if one.state == "leased" else "",
        "ended": moment(one.ended_at),
        "deadline": moment(one.deadline),
        "weights": f"{one.version}" + (f", oldest call {one.oldest_version}" if one.oldest_version is not None else ""),
        "tags": ", ".join(f"{name}={value}" for name, value in one.tags.items()),
    }
    if result is not None:
        fields["reward"] = number_text(result.reward)
        fields["error"] = f"{result.error.type}: {result.error.message}" if result.error else ""
        fields["metrics"] = ", ".join(f"{name}={number_text(value)}" for name, value in result.metrics.items())
    for loss in one.losses:
        fields[f"lost {loss.attempt}"] = f"{moment(loss.at)} {loss.reason}" + (
            f" ({loss.client_id})" * bool(loss.client_id)
        )
    return fields


def timeline_lines(found: EpisodeTimeline, *, full: bool) -> Iterator[str]:
    for attempt in found.attempts:
        yield ""
        yield f"attempt {attempt.attempt}: {attempt.outcome}; trace {attempt.trace_id}"
        began_at = min((call.began_at for call in attempt.calls), default=0.0)
        for at, lines in sorted(spans(attempt, full=full), key=lambda span: span[0]):
            first, *rest = lines
            yield f"  {at - began_at:+8.2f} s  {first}"
            yield from (f"              {line}" for line in rest)


def spans(attempt: AttemptTimeline, *, full: bool) -> Iterator[tuple[float, list[str]]]:
    for call in attempt.calls:
        yield call.began_at, call_lines(call, full=full)
    for tool in attempt.tools:
        yield tool.began_at, tool_lines(tool, full=full)


def call_lines(call: CallSpan, *, full: bool) -> list[str]:
    weights = "" if call.version is None else f", weights {call.version}"
    agent = f", agent {call.agent}" if call.agent else ""
    counts = f"{call.prompt_tokens} tokens read, {call.sampled_tokens} sampled"
    with_text = [message for message in (*call.messages, *call.answers) if message.get("content")]
    return [
        f"model call, {duration(call.seconds)}, {counts}{weights}{agent}",
        *(f"{message.get('role')}: {shown(str(message['content']), full=full)}" for message in with_text),
    ]


def tool_lines(tool: ToolSpan, *, full: bool) -> list[str]:
    took = "no result" if tool.seconds is None else duration(tool.seconds)
    arguments = shown(str(tool.arguments), full=full)
    result = [] if tool.result is None else [f"= {shown(tool.result, full=full)}"]
    return [f"tool {tool.name}, {took}: {arguments}", *result]


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else duration_text(seconds)


def shown(text: str, *, full: bool) -> str:
    line = " ".join(text.split())
    return text if full else line if len(line) <= LINE else f"{line[: LINE - 1]}…"
