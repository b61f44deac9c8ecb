"""`palestra data`: look at datasets, split and convert them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

from palestra.cli.output import FAILED, USAGE, fail, needs_extra, one_line_errors, print_json
from palestra.cli.run.common import json_option, print_table
from palestra.data.errors import DatasetError, DatasetNotFound
from palestra.data.kinds import DataKind
from palestra.data.layouts import Layout
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.chat import ChatTokenizer
    from palestra.training.batches.dataset_survey import DatasetSurvey, PictureCheck

F = TypeVar("F", bound=Callable[..., Any])

SHOWN_BAD_ROWS = 100


@click.group()
def data() -> None:
    """Check datasets as training reads them, measure, split and convert them."""


def _reading_options(command: F) -> F:
    command = click.option(
        "--max-length",
        type=click.IntRange(min=1),
        metavar="N",
        help="Count rows that max_sequence_length cuts, and those with nothing left to learn.",
    )(command)
    command = click.option("--model", metavar="MODEL", help="Count tokens under the chat template of this model.")(
        command
    )
    return click.option(
        "--as",
        "kind",
        type=click.Choice([one.value for one in DataKind]),
        help="What it is for: prompts (GRPO), chats (SFT), preferences (DPO). [what the first row has]",
    )(command)


@data.command()
@click.argument("source")
@click.option("--all", "is_all", is_flag=True, help=f"List all wrong rows, up to {SHOWN_BAD_ROWS}, not only the first.")
@_reading_options
@json_option
def check(
    source: str, is_all: bool, kind: str | None, model: str | None, max_length: int | None, as_json: bool
) -> None:
    """Check that training takes SOURCE, and name the first row that it does not take.

    SOURCE is a JSONL or Parquet file, a folder of them, or ORG/NAME[:SPLIT] of the Hugging Face hub in the local cache.
    Rows are read as `palestra train` reads them, and their pictures are decoded as a server does it; with --model, all
    of them are encoded, too.
    """
    tokenizer = _tokenizer(model)
    with _picture_check(tokenizer) as check_pictures:
        if is_all:
            _list_bad_rows(source, kind, tokenizer, check_pictures, as_json)
        with _data_errors(as_json):
            survey = _survey(source, kind, tokenizer, max_length, check_pictures)
    if as_json:
        print_json({"ok": True, **_facts(survey)})
        return
    click.echo(f"{source}: {survey.rows} rows of {survey.kind}, all of them good")
    for line in _limit_lines(survey, max_length):
        click.echo(line)


@data.command()
@click.argument("source")
@_reading_options
@json_option
def stats(source: str, kind: str | None, model: str | None, max_length: int | None, as_json: bool) -> None:
    """Count rows, roles, duplicates and, with --model, tokens of SOURCE.

    Tokens are those of training: `prompt` before the first learned one, `all` of the row (of pairs: of the longer
    answer), `learned`.
    """
    tokenizer = _tokenizer(model)
    with _data_errors(as_json):
        survey = _survey(source, kind, tokenizer, max_length)
    if as_json:
        print_json(_facts(survey))
        return
    roles = ", ".join(f"{count} {role}" for role, count in sorted(survey.roles.items()))
    lines = {
        "rows": f"{survey.rows} of {survey.kind}",
        "messages": f"{survey.messages} ({roles})",
        "with system prompt": survey.with_system,
        "with tools": survey.with_tools,
        "duplicates": survey.duplicates,
    }
    for name, value in lines.items():
        click.echo(f"{name:<18} {value}")
    if survey.tokens:
        summaries = {name: lengths.summary() for name, lengths in survey.tokens.items()}
        columns = list(next(iter(summaries.values())))
        rows = [[name, *(f"{summary[column]:.0f}" for column in columns)] for name, summary in summaries.items()]
        print_table([["tokens", *columns], *rows])
        click.echo(f"the longest row is {survey.longest}")
    for line in _limit_lines(survey, max_length):
        click.echo(line)


@data.command()
@click.argument("source")
@click.argument("out", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--part",
    "parts",
    multiple=True,
    metavar="NAME=SIZE",
    help="A part and its size: eval=200 rows, or eval=5%. May be repeated. [eval=10%]",
)
@click.option(
    "--by",
    default="prompt",
    show_default=True,
    metavar="KEY",
    help="Rows with the same KEY (a field, or a.b) stay together; prompt: what is asked; row: each by itself.",
)
@click.option("--seed", default=0, show_default=True, help="The same seed splits in the same way.")
@json_option
def split(source: str, out: Path, parts: tuple[str, ...], by: str, seed: int, as_json: bool) -> None:
    """Split SOURCE at random into DIR/train.jsonl, DIR/eval.jsonl and so on, with exact sizes.

    Rows with the same question stay together, so nothing in one part is known from another; --by names another group.
    """
    from palestra.data.splitting import REST, by_field, by_prompt, split_dataset

    sizes = dict(_part(text) for text in parts or ("eval=10%",))
    if REST in sizes or len(sizes) < len(parts):
        raise fail(f"name each part once, and not {REST}, which gets the rest", USAGE)
    group = {"row": None, "prompt": by_prompt}.get(by, by_field(by))
    with _data_errors(as_json), one_line_errors(OSError):
        written = split_dataset(source, sizes, out, group=group, seed=seed)
    if as_json:
        print_json({"folder": str(out), "rows": written, "seed": seed, "by": by})
        return
    for name, count in written.items():
        click.echo(f"{out / f'{name}.jsonl'}: {count} rows")


@data.command()
@click.argument("source")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--to",
    required=True,
    type=click.Choice([one.value for one in Layout]),
    help="messages (OpenAI's), prompt-completion, sharegpt, preferences (chosen and rejected), or prompts.",
)
@click.option("--lossy", is_flag=True, help="Convert also what the new layout cannot say; it is lost.")
@json_option
def convert(source: str, out: Path, to: str, lossy: bool, as_json: bool) -> None:
    """Convert SOURCE to another layout, as the JSONL file OUT.

    The layout of each row is recognised by its fields; fields that are no part of it stay. If something would be lost,
    the row is named and nothing is written.
    """
    from palestra.data.conversion import convert_dataset

    with _data_errors(as_json), one_line_errors(OSError):
        rows = convert_dataset(source, out, Layout(to), lossy=lossy)
    if as_json:
        print_json({"file": str(out), "rows": rows, "layout": to})
    else:
        click.echo(f"{out}: {rows} rows of {to}")


@contextmanager
def _data_errors(as_json: bool) -> Iterator[None]:
    """A bad row is named as FILE:LINE, which editors open."""
    try:
        yield
    except DatasetError as error:
        code = USAGE if isinstance(error, DatasetNotFound) else FAILED
        if as_json:
            print_json(_error_facts(error))
            raise SystemExit(code) from None
        raise fail(_error_text(error), code) from None


def _error_text(error: DatasetError) -> str:
    return error.problem if error.place is None else f"{error.place.short}: {error.problem}"


def _error_facts(error: DatasetError) -> JsonObject:
    place = error.place
    return {
        "ok": False,
        "file": None if place is None else place.file,
        "line": None if place is None else place.line,
        "error": error.problem,
    }


def _tokenizer(model: str | None) -> ChatTokenizer | None:
    if model is None:
        return None
    with needs_extra("train"):
        from palestra.chat import ChatError, ChatTokenizer
        from palestra.config.bundled import find_model
    with one_line_errors(ValueError, ChatError, OSError, code=USAGE):
        return ChatTokenizer.load(find_model(model))


@contextmanager
def _picture_check(tokenizer: ChatTokenizer | None) -> Iterator[PictureCheck]:
    with needs_extra("train"):
        from palestra.cli.picture_check import picture_checker
    with picture_checker(None if tokenizer is None else tokenizer.card) as checker:
        yield checker.check


def _survey(
    source: str,
    kind: str | None,
    tokenizer: ChatTokenizer | None,
    limit: int | None,
    check_pictures: PictureCheck | None = None,
) -> DatasetSurvey:
    if limit is not None and tokenizer is None:
        raise fail("--max-length counts tokens; name the model whose tokens they are with --model", USAGE)
    with needs_extra("train"):
        from palestra.training.batches.dataset_survey import no_check, survey_dataset
    return survey_dataset(
        source, None if kind is None else DataKind(kind), tokenizer, limit, check_pictures or no_check
    )


def _list_bad_rows(
    source: str, kind: str | None, tokenizer: ChatTokenizer | None, check_pictures: PictureCheck, as_json: bool
) -> None:
    """Lists them and ends with an error; returns if there are none."""
    with needs_extra("train"):
        from palestra.training.batches.dataset_survey import bad_rows
    found: list[DatasetError] = []
    with _data_errors(as_json):
        for error in bad_rows(source, None if kind is None else DataKind(kind), tokenizer, check_pictures):
            found.append(error)
            if len(found) == SHOWN_BAD_ROWS:
                break
    if as_json and found:
        print_json({"ok": False, "errors": [_error_facts(error) for error in found]})
    for error in found if not as_json else ():
        click.echo(f"error: {_error_text(error)}", err=True)
    if found:
        raise SystemExit(FAILED)


def _facts(survey: DatasetSurvey) -> JsonObject:
    tokens = {name: lengths.summary() for name, lengths in survey.tokens.items()}
    counted = {"tokens": tokens, "longest": survey.longest, "cut": survey.cut, "empty": survey.empty}
    return {
        "kind": survey.kind,
        "rows": survey.rows,
        "messages": survey.messages,
        "roles": survey.roles,
        "with_system": survey.with_system,
        "with_tools": survey.with_tools,
        "duplicates": survey.duplicates,
        **(counted if tokens else {}),
    }


def _limit_lines(survey: DatasetSurvey, limit: int | None) -> Iterator[str]:
    if survey.cut and limit:
        yield f"{survey.cut} rows are longer than {limit} tokens and lose their end"
    if survey.empty:
        within = f" within {limit} tokens" if limit else ""
        yield f"{survey.empty} rows have nothing to learn{within} and are skipped"


def _part(text: str) -> tuple[str, int | float]:
    name, _, size = text.partition("=")
    try:
        share = float(size.removesuffix("%")) / 100 if size.endswith("%") else None
        count = int(size) if share is None else share
    except ValueError:
        count = -1
    if not name.isidentifier() or count <= 0 or (isinstance(count, float) and count >= 1):
        raise fail(f"--part {text}: give a name and a size, such as eval=200 or eval=5%", USAGE)
    return name, count
