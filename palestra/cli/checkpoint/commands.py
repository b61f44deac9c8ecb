"""`palestra checkpoint`: list, look at, export, publish and delete the checkpoints of runs and servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import rich_click as click
from msgspec import to_builtins

from palestra.cli.checkpoint.common import (
    base_name_option,
    base_option,
    dtype_option,
    find_saved,
    form_option,
    ollama_base_option,
    pre_tokenizer_option,
    quant_option,
    server_and_key,
)
from palestra.cli.checkpoint.sharing import import_, push
from palestra.cli.options import server_options
from palestra.cli.output import fail, needs_extra, print_json
from palestra.cli.run.common import find, json_option, print_table, run_errors, runs_option
from palestra.runs.export_form import ExportForm, GgufSettings
from palestra.util.amounts import bytes_text

if TYPE_CHECKING:
    from palestra.checkpoints import SavedCheckpoint
    from palestra.checkpoints.export_check import ExportCheck
    from palestra.runs.export_form import ExportDtype, GgufQuant

ADDRESS = "tinker://"
FORMS: dict[ExportForm, str] = {
    "peft": "adapter for PEFT",
    "merged": "whole model",
    "gguf": "whole model as a GGUF file",
    "gguf-adapter": "adapter as a GGUF file",
    "ollama": "GGUF file with a Modelfile for Ollama",
}


@click.group()
def checkpoint() -> None:
    """List, look at, export, publish, import and delete checkpoints of runs and servers."""


checkpoint.add_command(import_)
checkpoint.add_command(push)


@checkpoint.command("list")
@click.argument("which", metavar="[RUN]", required=False)
@runs_option
@server_and_key
@json_option
def list_(which: str | None, root: Path, server: str | None, key: str | None, as_json: bool) -> None:
    """List the checkpoints of RUN, or with --server those of a server, newest first."""
    if which is None:
        _list_of_server(server, key, as_json)
        return
    with run_errors():
        from palestra.checkpoints import list_checkpoints, selected_step

        run = find(which, root)
        found = list_checkpoints(run)
        selected = selected_step(run, found)
        found.reverse()
    if as_json:
        print_json([{**_facts(one), "is_selected": one.step == selected} for one in found])
    elif not found:
        click.echo(f"{which} has no checkpoints yet")
    else:
        scores = sorted({name for one in found for name in one.scores})
        rows = [
            [
                one.name,
                "selected" if one.step == selected else "",
                *(f"{one.scores[s]:.3f}" if s in one.scores else "" for s in scores),
                _where(one),
            ]
            for one in found
        ]
        print_table([["checkpoint", "", *scores, "where"], *rows])


def _list_of_server(server: str | None, key: str | None, as_json: bool) -> None:
    if server is None:
        raise click.UsageError("name a run, or give the address of a server with --server")
    with run_errors():
        from palestra.checkpoints.remote import ServerCheckpoints

        found = ServerCheckpoints(server, key).list()
    if as_json:
        print_json([one.model_dump(mode="json") for one in found])
    elif not found:
        click.echo(f"{server} has no checkpoints of yours")
    else:
        rows = [[one.tinker_path, bytes_text(one.size_bytes or 0), f"{one.time:%Y-%m-%d %H:%M}"] for one in found]
        print_table([["address", "size", "saved"], *rows])


@checkpoint.command()
@click.argument("which", metavar="RUN[@STEP]")
@runs_option
@json_option
def show(which: str, root: Path, as_json: bool) -> None:
    """Show a checkpoint: RUN@200, RUN@best, RUN@last, or the one that RUN has selected."""
    with run_errors():
        found = find_saved(which, root)
    if as_json:
        print_json(_facts(found))
        return
    lines = {"run": found.run, "step": found.step, "address": found.address, "where": _where(found), **found.scores}
    for name, value in lines.items():
        click.echo(f"{name:<16} {value}")
    click.echo(f"to export it: palestra checkpoint export {which} DIR")


@checkpoint.command()
@click.argument("which", metavar="CHECKPOINT")
@click.argument("out", metavar="DIR", type=click.Path(path_type=Path))
@form_option
@base_option
@base_name_option
@dtype_option
@quant_option
@pre_tokenizer_option
@ollama_base_option
@click.option("--check", is_flag=True, help="Load the export in transformers and compare it with the checkpoint.")
@runs_option
@server_and_key
@json_option
def export(
    which: str,
    out: Path,
    form: ExportForm,
    base: str | None,
    base_name: str | None,
    dtype: ExportDtype | None,
    quant: GgufQuant | None,
    pre_tokenizer: str | None,
    ollama_base: str | None,
    check: bool,
    root: Path,
    server: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Write CHECKPOINT to DIR in a form that other tools load.

    CHECKPOINT is RUN, RUN@STEP, RUN@best or RUN@last, also while the run goes on; the folder of an adapter; or a
    tinker:// address at --server. RUN alone is the checkpoint that the run has selected, its newest while it goes on.
    """
    with run_errors(), _files_of(which, root, server, key) as source, needs_extra("engine"):
        from palestra.checkpoints.export import base_of, export_checkpoint

        adapter, folder = source.folder, base_of(source.folder, base)
        settings = GgufSettings(quant, pre_tokenizer, ollama_base)
        export_checkpoint(adapter, out, form, base=folder, base_name=base_name, dtype=dtype, gguf=settings)
        size = sum(file.stat().st_size for file in out.iterdir())
        checked = _check(out, form, adapter, folder) if check else None
    if as_json:
        facts = {"folder": str(out), "checkpoint": source.name, "form": form, "base": str(folder), "size_bytes": size}
        print_json(facts | ({"check": to_builtins(checked)} if checked else {}))
    else:
        click.echo(f"{out}: {FORMS[form]}, {bytes_text(size)}, of {source.name} on {folder}")
        if checked is not None:
            click.echo(_check_text(checked))
    if checked is not None and not checked.is_good:
        raise fail(f"{out} does not say in transformers what {which} says here; please report this")


@checkpoint.command()
@click.argument("address", metavar="ADDRESS")
@server_options()
def delete(address: str, server: str, key: str | None) -> None:
    """Delete the checkpoint at a tinker:// ADDRESS of a server."""
    with run_errors():
        from palestra.checkpoints.remote import ServerCheckpoints

        ServerCheckpoints(server, key).delete(address)
    click.echo(f"{address} is deleted")


class _CheckpointFiles(NamedTuple):
    name: str
    """The checkpoint with its step, as in `first@4`, or what the user named."""
    folder: Path


@contextmanager
def _files_of(which: str, root: Path, server: str | None, key: str | None) -> Iterator[_CheckpointFiles]:
    """The files of a checkpoint, downloaded if need be."""
    from palestra.checkpoints import CheckpointError
    from palestra.checkpoints.sources import downloaded, saved_files

    if (Path(which) / "adapter_config.json").is_file():
        yield _CheckpointFiles(which, Path(which))
    elif not which.startswith(ADDRESS):
        saved = find_saved(which, root)
        with saved_files(saved, server=server, key=key) as folder:
            yield _CheckpointFiles(saved.name, folder)
    elif server is None:
        raise CheckpointError(f"{which} is at a server; give its address with --server")
    else:
        with downloaded(which, server, key) as folder:
            yield _CheckpointFiles(which, folder)


def _check(out: Path, form: ExportForm, adapter: Path, base: Path) -> ExportCheck:
    with needs_extra("dev"):
        from palestra.checkpoints.export_check import check_export

        return check_export(out, form, adapter, base)


def _check_text(found: ExportCheck) -> str:
    difference = f"{found.mean_difference:.1e} nats in the mean, {found.largest_difference:.1e} at most"
    text = f"log-probabilities in transformers differ by {difference}; the adapter changes them by {found.change:.2f}"
    return "\n".join([text, *found.warnings])


def _where(one: SavedCheckpoint) -> str:
    return str(one.folder or one.server or "files are gone")


def _facts(one: SavedCheckpoint) -> dict[str, object]:
    return {
        "run": one.run.name,
        "step": one.step,
        "address": one.address,
        "server": one.server,
        "folder": None if one.folder is None else str(one.folder),
        "scores": one.scores,
    }
