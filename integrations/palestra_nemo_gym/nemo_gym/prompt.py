"""Prompts as files: a YAML with `user` and perhaps `system`, filled from the fields of a row."""

from __future__ import annotations

from functools import lru_cache

import yaml
from pydantic import BaseModel

from nemo_gym import _resolve_under_cwd_or_install
from nemo_gym.json_types import JsonObject


class PromptConfig(BaseModel):
    user: str
    system: str | None = None


@lru_cache(maxsize=64)
def load_prompt_config(path: str) -> PromptConfig:
    """A relative path is looked for below the roots."""
    return PromptConfig.model_validate(yaml.safe_load(_resolve_under_cwd_or_install(path).read_text(encoding="utf-8")))


def fill_prompt(prompt_config: PromptConfig, row: JsonObject) -> list[dict[str, str]]:
    """Messages. Raises KeyError with the fields there are, where one is missing."""
    texts = {"system": prompt_config.system, "user": prompt_config.user}
    try:
        return [{"role": role, "content": text.format_map(row)} for role, text in texts.items() if text is not None]
    except KeyError as error:
        raise KeyError(f"the prompt asks for {error}, the row has {', '.join(row)}") from None


def validate_prompt_compatibility(rows: list[JsonObject], prompt_config: PromptConfig) -> None:
    """Raises ValueError with the rows that have an input already."""
    found = [number for number, row in enumerate(rows) if (row.get("responses_create_params") or {}).get("input")]
    if found:
        raise ValueError(f"rows {found} have responses_create_params.input: it and a prompt config exclude each other")


def apply_prompt_to_row(row: JsonObject, prompt_config: PromptConfig) -> JsonObject:
    """Another row, whose input is the filled prompt."""
    given = row.get("responses_create_params")
    params = given if isinstance(given, dict) else {}
    return {**row, "responses_create_params": {**params, "input": fill_prompt(prompt_config, row)}}
