"""Runs chat templates as `transformers` does, without it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from palestra.chat.errors import ChatError
from palestra.util.json_types import JsonMapping

Messages = Sequence[JsonMapping]
Tools = Sequence[JsonMapping]

TEMPLATE_FILE = "chat_template.jinja"
THINKING_KEY = re.compile(r"""[.'"]thinking\b""")
"""How templates refer to the reasoning of a message if they call it `thinking`."""
WITH_TOOLS = "tool_use"
"""The name of a second template, in folders that have one for conversations with tools."""


class ChatTemplate:
    """A compiled template; `variables` are the special tokens that templates refer to by name."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], where: str) -> None:
        self._where = where
        self._variables = dict(variables)
        try:
            self._compiled = {name: _compiled(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"the chat template of {where} is broken in line {error.lineno}: {error.message}") from None
        self._names_thinking = any(THINKING_KEY.search(source) for source in sources.values())
        self._read = frozenset[str]().union(*map(_variables, sources.values()))

    def knows(self, variable: str) -> bool:
        """Whether the template reads this variable; others would change nothing."""
        return variable in self._read

    def render(self, messages: Messages, tools: Tools | None, add_generation_prompt: bool, kwargs: JsonMapping) -> str:
        template = self._compiled["default"]
        if tools is not None:
            template = self._compiled.get(WITH_TOOLS, template)
        if self._names_thinking:
            messages = [_with_thinking(message) for message in messages]
        inputs = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return template.render(self._variables | {"documents": None} | dict(kwargs) | inputs)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ChatError(
                f"the chat template of {self._where} refuses a conversation ({roles}): {type(error).__name__}: {error}"
            ) from error


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    """Compiled once: a run opens its model's template several times, and a server's runs are of a few models."""
    return _ENVIRONMENT.from_string(source)


@lru_cache(maxsize=64)
def _variables(source: str) -> set[str]:
    return meta.find_undeclared_variables(_ENVIRONMENT.parse(source))


def has_template(folder: Path, tokenizer_config: JsonMapping) -> bool:
    return (folder / TEMPLATE_FILE).is_file() or bool(tokenizer_config.get("chat_template"))


def read_sources(folder: Path, tokenizer_config: JsonMapping) -> dict[str, str]:
    """Returns templates by name; `default` is always there."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    found = tokenizer_config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found if isinstance(entry, dict) and len(entry) == 2}
        if "default" in named:
            return named
    raise ChatError(
        f"no chat template in {folder}: neither {TEMPLATE_FILE} nor `chat_template` in tokenizer_config.json\n"
        f"  a base model has none: copy {TEMPLATE_FILE} of its chat version into the folder, "
        "or name a folder that has one (model.tokenizer=DIR)"
    )


def _with_thinking(message: JsonMapping) -> JsonMapping:
    """Puts reasoning under the name that gpt-oss's template uses. The template refuses text beside reasoning and calls,
    and shows what stands before a call as reasoning, so text becomes reasoning there."""
    thought, content = message.get("reasoning_content"), message.get("content")
    if not thought:
        return message
    if message.get("tool_calls") and content:
        return {**message, "thinking": f"{thought}\n{content}", "content": ""}
    return {**message, "thinking": thought}


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant says; here the tag just renders its contents."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML, which no model has seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
