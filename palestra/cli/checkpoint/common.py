"""Shared by the commands about checkpoints: finding one, and options of an export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import rich_click as click

from palestra.cli.options import server_options
from palestra.cli.run.common import find
from palestra.runs.export_form import ExportDtype, ExportForm, GgufQuant, PublishedForm

if TYPE_CHECKING:
    from palestra.checkpoints import SavedCheckpoint

server_and_key = server_options(default=None)
form_option = click.option(
    "--as",
    "form",
    type=click.Choice(get_args(ExportForm)),
    default="peft",
    show_default=True,
    help="An adapter for PEFT and vLLM, a whole model with the adapter folded in, or either as a GGUF file for "
    "llama.cpp, or with a Modelfile for Ollama.",
)
published_form_option = click.option(
    "--as",
    "form",
    type=click.Choice(get_args(PublishedForm)),
    default="peft",
    show_default=True,
    help="An adapter for PEFT and vLLM, or a whole model with the adapter folded in.",
)
base_option = click.option("--base", metavar="DIR_OR_ID", help="The model it was trained on. [as the checkpoint says]")
base_name_option = click.option(
    "--base-name", metavar="NAME", help="What the adapter calls its base. [its Hugging Face id or folder name]"
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(get_args(ExportDtype)),
    help="What the weights of a whole model are written in; fp8, nf4: those of linear layers. [as the base is stored]",
)
quant_option = click.option(
    "--quant",
    type=click.Choice(get_args(GgufQuant)),
    help="What the matrices of a GGUF file are written in. [as the base is stored]",
)
pre_tokenizer_option = click.option(
    "--pre-tokenizer",
    metavar="NAME",
    help="llama.cpp's name for how text is split into words, in a GGUF file. [that of the model's tokenizer]",
)
ollama_base_option = click.option(
    "--ollama-base",
    metavar="NAME",
    help="With --as ollama: write an adapter on this model of Ollama. [write the whole model]",
)


def find_saved(which: str, root: Path) -> SavedCheckpoint:
    """The checkpoint that `RUN`, `RUN@STEP`, `RUN@best` or `RUN@last` names."""
    from palestra.checkpoints import find_checkpoint, split_name

    run, step = split_name(which)
    return find_checkpoint(find(run, root), step)
