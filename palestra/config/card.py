"""Facts for the card of a published model that the run does not know by itself."""

from __future__ import annotations

from pydantic import Field

from palestra.config.base import Config


class DataSource(Config):
    """Data that a model was trained on."""

    name: str = Field(min_length=1)
    """What it is called; a dataset of the Hugging Face hub by its id."""
    license: str | None = None
    """Its licence, best as an SPDX id such as apache-2.0."""
    url: str | None = None
    """Where the data can be found."""


class CardConfig(Config):
    """For the model card that `palestra checkpoint push` writes."""

    description: str | None = None
    """A sentence or more on what the model is for."""
    license: str | None = None
    """Licence of the published weights, as the hub names it, such as apache-2.0. It cannot allow more than the base
    model's licence does."""
    data: list[DataSource] = Field(default=[])
    """The data behind the tasks, conversations or preferences, with its licence."""
