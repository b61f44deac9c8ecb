"""Prompt files: a row's input made from its fields, so that prompts change without new data.

Owns: reading the file, filling its templates. Never touches: what a row is otherwise.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from palestra.gym.collect.errors import CollectError
from palestra.gym.records import PARAMS
from palestra.util.json_types import JsonMapping, JsonObject


class PromptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`{field}` is a row's top-level field; braces are doubled to be themselves."""

    user: str
    system: str | None = None

    @classmethod
    def read(cls, path: Path) -> PromptFile:
        try:
            return msgspec.convert(yaml.safe_load(path.read_text()), cls)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
            raise CollectError(f"prompt file {path}: {error}; it has `user`, and `system` if you like") from error

    def applied(self, row: JsonMapping) -> JsonObject:
        """A new row whose `responses_create_params.input` is the prompt. Raises CollectError."""
        params = row.get(PARAMS) or {}
        if not isinstance(params, dict):
            raise CollectError(f"a row's {PARAMS} is an object, found {type(params).__name__}")
        if params.get("input"):
            raise CollectError(f"a row has {PARAMS}.input and there is a prompt file; use one of the two")
        messages = [
            {"role": role, "content": self._filled(template, row)}
            for role, template in (("system", self.system), ("user", self.user))
            if template is not None
        ]
        return {**row, PARAMS: {**params, "input": messages}}

    def _filled(self, template: str, row: JsonMapping) -> str:
        try:
            return template.format_map(row)
        except (KeyError, IndexError) as error:
            raise CollectError(f"the prompt's {error} is not among the row's fields {sorted(row)}") from error
        except (ValueError, AttributeError, TypeError) as error:
            raise CollectError(
                f"the prompt cannot be filled in: {error}; braces are doubled to be themselves"
            ) from error
