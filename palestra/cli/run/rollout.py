"""`palestra rollout`: from a number in a chart to the conversations and tokens behind it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.output import print_json
from palestra.cli.run.common import find, json_option, print_table, run_errors, runs_option
from palestra.runs.rollout_records import RolloutRecord, TokenRecord
from palestra.types.rollouts import Message
from palestra.util.figures import number_text
from palestra.util.json_types import JsonObject
from palestra.util.safe_text import safe_text

if TYPE_CHECKING:
    from rich.console import Console

    from palestra.runs.reader import FoundRollout

ROLE_STYLES = {"system": "bold magenta", "user": "bold blue", "assistant": "bold green", "tool": "bold yellow"}
SNIPPET = 48


@click.group()
def rollout() -> None:
    """List and read the rollouts of training runs."""


@rollout.command("list")
@click.argument("which", metavar="RUN")
@click.option("--step", type=int, help="Only rollouts of this step. [all, newest first]")
@click.option("--eval", "evals", is_flag=True, help="List rollouts of evaluations.")
@click.option(
    "--where",
    metavar="CONDITION",
    help='A condition such as "reward<0.2 and stop=\'length\'" or "metrics.parse_error>0".',
)
@click.option(
    "--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Maximum number of rollouts; 0 for all."
)
@runs_option
@json_option
def list_(which: str, step: int | None, evals: bool, where: str | None, limit: int, root: Path, as_json: bool) -> None:
    """List the rollouts of RUN, a name or a folder."""
    from palestra.runs.rollout_filter import WhereError, parse_where
    from palestra.runs.rollout_search import matching_rollouts

    try:
        matches = parse_where(where) if where is not None else lambda record: True
        with run_errors():
            found = matching_rollouts(find(which, root), step, evals, matches)
            records = list(islice(found, limit + 1)) if limit else list(found)
    except WhereError as error:
        raise click.BadParameter(str(error), param_hint="--where") from error
    shown = records[:limit] if limit else records
    if as_json:
        print_json([{name: value for name, value in record.items() if name != "messages"} for record in shown])
        return
    if not shown:
        click.echo("no rollouts" + (f" with {where}" if where else ""))
        return
    columns = ("id", "step", "environment", "task", "reward", "stop", "turns", "tokens")
    rows = [[*columns, "last words"]]
    rows += [[*(number_text(record.get(column)) for column in columns), last_message(record)] for record in shown]
    print_table(rows)
    if len(records) > len(shown):
        click.echo(f"more than {limit}; to see all: --limit 0")
    click.echo(f"to read one: palestra rollout show {safe_text(shown[0]['id'], keep='')} --run {which}")


@rollout.command()
@click.argument("rollout_id", metavar="ID")
@click.option("--run", "which", metavar="RUN", help="A name or a folder.  [the newest run that has it]")
@click.option("--step", type=int, help="Step, if the id occurs in several, as in evaluations. [the newest]")
@click.option("--tokens", "with_tokens", is_flag=True, help="Show every token instead of the messages.")
@click.option(
    "--color",
    type=click.Choice(["mask", "logprob", "advantage"]),
    default="mask",
    show_default=True,
    help="What the colours of the tokens show.",
)
@runs_option
@json_option
def show(
    rollout_id: str, which: str | None, step: int | None, with_tokens: bool, color: str, root: Path, as_json: bool
) -> None:
    """Show the rollout ID, or the beginning of an id: its conversation, or its tokens."""
    with run_errors():
        from palestra.runs.rollout_search import find_rollout, tokens_of

        run, found = find_rollout(rollout_id, which, step, root)
        tokens = tokens_of(run, found) if with_tokens else None
        tokenizer = run.read_about()["facts"].get("tokenizer")
    if as_json:
        print_json({"run": run.name, "part": found.part, **found.record, **({"tokens_of": tokens} if tokens else {})})
        return
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    print_head(console, found)
    if tokens is not None:
        print_tokens(console, tokens, tokenizer, color)
    else:
        print_messages(console, found.record)
        if judgement := found.record.get("judgement"):
            score = "no verdict" if judgement["score"] is None else number_text(judgement["score"])
            detail = safe_text(judgement["error"] or judgement["answer"])
            console.print(f"judge {judgement['judge']}: {score}\n{detail}", style="dim")
        if verdict := found.record.get("verdict"):
            console.print(f"verifier: {safe_text(json.dumps(verdict, ensure_ascii=False, indent=2))}", style="dim")


def print_head(console: Console, found: FoundRollout) -> None:
    record = found.record
    facts = {
        "rollout": f"{record['id']} of run {found.run}, {found.part} of step {found.step}",
        "task": f"{record['task']} of {record['environment']}, group {record['group']}",
        "reward": number_text(record["reward"]),
        "stop": record["stop"],
        "size": f"{record['turns']} turns, {record['tokens']} tokens after {record['prompt_tokens']} of prompt, "
        f"{number_text(record['seconds'])} s, weights {record['version']}, temperature {record['temperature']}",
        "trained on": {True: "yes", False: "no", None: None}[record.get("used")],
        "metrics": ", ".join(f"{name} {number_text(value)}" for name, value in record["metrics"].items()),
        "error": record["error"],
    }
    for name, text in facts.items():
        if text:
            console.print(f"{name:<12}{safe_text(str(text), keep='')}")
    console.print()


def print_messages(console: Console, record: JsonObject) -> None:
    from rich.text import Text

    for message in record["messages"]:
        role = str(message.get("role"))
        console.print(Text(safe_text(role, keep=""), ROLE_STYLES.get(role, "bold")))
        console.print(Text(safe_text(content_text(message))))
        console.print()


def print_tokens(console: Console, tokens: TokenRecord, folder: str | None, color: str) -> None:
    from palestra.cli.run.token_view import LEGENDS, Color, colored, table_rows
    from palestra.runs.token_cells import load_tokenizer, token_cells

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        click.echo(f"no tokenizer found in {folder}: token ids are shown", err=True)
    cells = token_cells(tokens, tokenizer)
    if console.color_system is None or console.no_color:
        print_table(table_rows(cells))
        return
    console.print(LEGENDS[Color(color)])
    console.print(colored(cells, Color(color)))


def content_text(message: Message) -> str:
    """The text of a message, followed by its other parts, such as tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    return "\n".join([*([str(content)] if content else []), *(f"{name}: {value}" for name, value in rest.items())])


def last_message(record: RolloutRecord) -> str:
    answers = [message for message in record.get("messages") or [] if message.get("role") == "assistant"]
    text = " ".join(content_text(answers[-1]).split()) if answers else record.get("error") or ""
    text = safe_text(text, keep="")
    return text if len(text) <= SNIPPET else f"…{text[1 - SNIPPET :]}"
