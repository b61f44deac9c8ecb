"""`palestra checkpoint push` and `import`: publishing a checkpoint, and bringing one in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click
from msgspec import to_builtins

from palestra.cli.checkpoint.common import (
    base_name_option,
    base_option,
    dtype_option,
    find_saved,
    published_form_option,
    server_and_key,
)
from palestra.cli.options import server_options
from palestra.cli.output import needs_extra, print_json, print_result
from palestra.cli.run.common import json_option, run_errors, runs_option
from palestra.util.amounts import bytes_text
from palestra.util.hugging_face import is_hub_id
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.runs.export_form import ExportDtype, PublishedForm


@click.command()
@click.argument("which", metavar="RUN[@STEP]")
@click.argument("target", metavar="hf:ORG/NAME")
@published_form_option
@base_option
@base_name_option
@dtype_option
@click.option("--public", is_flag=True, help="Make a new repository public. [private]")
@click.option("--update", is_flag=True, help="Add a commit to a repository that has files already.")
@click.option("--dry-run", is_flag=True, help="Print the model card and the files, and upload nothing.")
@runs_option
@server_and_key
@json_option
def push(
    which: str,
    target: str,
    form: PublishedForm,
    base: str | None,
    base_name: str | None,
    dtype: ExportDtype | None,
    public: bool,
    update: bool,
    dry_run: bool,
    root: Path,
    server: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Publish a checkpoint of a run at the Hugging Face hub, with a model card written from the run.

    A repeated command goes on where an interrupted upload broke off.
    """
    with run_errors(), needs_extra("engine"):
        from palestra.checkpoints.hub import HubRepository

        found, repository = find_saved(which, root), HubRepository(target)
        if not dry_run:
            repository.check(update=update)
        from palestra.checkpoints.push import prepared  # which takes seconds to import

        where = {"base": base, "base_name": base_name, "server": server, "key": key}
        made = prepared(found, repository, form, dtype=dtype, **where)
        with made as publication:
            facts: JsonObject = {
                "repository": repository.name,
                "url": repository.url,
                "checkpoint": found.name,
                "form": form,
            }
            facts |= {"files": publication.files, "card": publication.card, "commit": None}
            if not dry_run:
                message = f"Weights of {found.name}"
                facts["commit"] = repository.upload(publication.folder, public=public, message=message)
    if as_json:
        print_json(facts)
        return
    if dry_run:
        click.echo(facts["card"])
    for name, size in facts["files"].items():
        click.echo(f"{bytes_text(size):>10}  {name}")
    click.echo("nothing was uploaded" if dry_run else f"{found.name} is at {repository.url}")
    if not is_hub_id(publication.base_name) and form == "peft":
        click.echo(
            f"users may not find its base {publication.base_name}; name one of the hub with --base-name", err=True
        )


@click.command("import")
@click.argument("source", metavar="DIR_OR_ID")
@click.option("--model", metavar="NAME", help="The base model at the server. [the one that the adapter names]")
@click.option("--name", metavar="NAME", help="Name of the checkpoint. [that of the folder]")
@server_options()
@json_option
def import_(source: str, model: str | None, name: str | None, server: str, key: str | None, as_json: bool) -> None:
    """Bring an adapter of PEFT into a server, as a checkpoint to sample from and to train on.

    DIR_OR_ID is a folder, or a Hugging Face id in the local cache (`palestra model pull ID`).
    """
    with run_errors(), needs_extra("engine"):
        from palestra.checkpoints.importing import import_adapter

        made = import_adapter(source, server, key, model=model, name=name)
    text = f"{source} is a checkpoint of {made.base_model}, rank {made.rank}\n"
    text += f"to train on: palestra train CONFIG --server {server} model.start_from={made.weights}\n"
    text += f"to sample from: {made.sampler_weights}"
    print_result(as_json, to_builtins(made), text)
