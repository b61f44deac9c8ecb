"""The address to which the end of a run is reported."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, field_serializer

from palestra.config.base import Config
from palestra.config.redaction import REDACTED

Ending = Literal["done", "stopped", "failed"]


class WebhookConfig(Config):
    """An address that gets a POST when a run ends, however it ends."""

    url: str = Field(pattern=r"^(https?://\S+|\$[A-Za-z_][A-Za-z0-9_]*|\[redacted\])$")
    """The address, or `$NAME` for the environment variable that has it. An address is a secret: it is not saved with
    the run, so a resume needs it again, unless it is a variable."""
    on: list[Ending] = Field(default=["done", "stopped", "failed"], min_length=1)
    """Ends that are reported."""

    @field_serializer("url")
    def _hidden(self, url: str) -> str:
        return url if url.startswith("$") else REDACTED

    @property
    def address(self) -> str | None:
        """The address; None if the variable is not set, or if it was not saved."""
        if self.url.startswith("$"):
            return os.environ.get(self.url[1:]) or None
        return None if self.url == REDACTED else self.url
