"""The files of a model that a config names: its folder, its tokenizer."""

from __future__ import annotations

from pathlib import Path

import psutil

from palestra.config.bundled import find_model
from palestra.config.train import TrainModel


class SetupError(ValueError):
    """The run cannot begin; the message says what is missing, and what to type."""


def model_folder(model: TrainModel) -> Path:
    return find_model(model.name).absolute()


def check_model(folder: Path) -> None:
    """Checks that a model for a server of our own exists and fits into memory; otherwise its worker would be killed
    without a message."""
    if not (folder / "config.json").is_file():
        raise SetupError(f"model.name: {folder} is not a model folder; to make a small one: palestra model random DIR")
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    memory = psutil.virtual_memory().available
    if weights > memory:
        sizes = f"take {weights / 2**30:.1f} GiB, but {memory / 2**30:.1f} GiB of memory are free"
        raise SetupError(
            f"model.name: the weights in {folder} {sizes}; use a smaller model, or another server: --server URL"
        )


def tokenizer_of(model: TrainModel) -> Path:
    if model.tokenizer is not None:
        return model.tokenizer
    try:
        return model_folder(model)
    except ValueError as error:
        raise SetupError(
            f"no tokenizer for {model.name}: {error}; or name a folder that has it: model.tokenizer=DIR"
        ) from None
