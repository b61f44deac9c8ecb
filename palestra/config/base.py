"""The base of all config models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from palestra.util.hugging_face import is_hub_dataset


class Config(BaseModel):
    """A frozen pydantic model that refuses unknown keys; the text below a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


Folder = File = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
"""A path; if relative, it starts at the current directory, whichever file it is written in."""

Dataset = Annotated[Path, AfterValidator(lambda path: path if is_hub_dataset(path) else path.expanduser().absolute())]
"""A file, or a dataset of the Hugging Face hub in the cache of this machine."""
