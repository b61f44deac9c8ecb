"""Tool formats by name, and by the chat template."""

from __future__ import annotations

import re
from importlib import import_module

from palestra.chat.errors import ChatError
from palestra.chat.tool_parsers.gemma4 import CALL as GEMMA4_CALL
from palestra.chat.tool_parsers.gemma4 import Gemma4Format
from palestra.chat.tool_parsers.glm import KEY, GlmToolParser
from palestra.chat.tool_parsers.harmony import HarmonyFormat
from palestra.chat.tool_parsers.harmony_parser import CHANNEL
from palestra.chat.tool_parsers.hermes import HermesToolParser
from palestra.chat.tool_parsers.llama3_json import PYTHON_TAG, Llama3JsonToolParser
from palestra.chat.tool_parsers.mistral import MARKER, MistralToolParser
from palestra.chat.tool_parsers.protocol import AnswerFormat, CallFormat, ToolParser
from palestra.chat.tool_parsers.qwen_xml import FUNCTION, QwenXmlToolParser
from palestra.chat.tool_parsers.section_calls import DEEPSEEK, KIMI
from palestra.util.suggest import nearest

HERMES, LLAMA3_JSON = HermesToolParser(), Llama3JsonToolParser()
# The first mark that a template has decides: a format whose calls begin with `<tool_call>` goes before Hermes.
MARKS: tuple[tuple[str, CallFormat], ...] = (
    (CHANNEL, HarmonyFormat()),
    (GEMMA4_CALL, Gemma4Format()),
    (FUNCTION, QwenXmlToolParser()),
    (KEY, GlmToolParser()),
    *((marker, HERMES) for marker in HERMES.markers),
    (MARKER, MistralToolParser()),
    (DEEPSEEK.opening, DEEPSEEK),
    (KIMI.opening, KIMI),
    (PYTHON_TAG, LLAMA3_JSON),
)
"""Texts in a template that show its format, in the order they are searched for: several formats begin a call as Hermes
does."""
LLAMA_CALL = re.compile(r'"name\\?": [^{}]{0,40}"parameters\\?": ')
"""How templates that ask for JSON describe a call."""
WRITES_CALLS = re.compile(r"\btool_calls\b")
"""How templates refer to the calls of a message."""
PARTS = ("name", "markers", "openings", "tags", "block", "grammar")
TOOL_FORMATS: dict[str, CallFormat] = {}
"""The known formats, by name."""


def register(tools: CallFormat) -> None:
    """Registers a format; one of the same name is replaced."""
    if not isinstance(tools, AnswerFormat):
        _check_parts(tools)
    TOOL_FORMATS[tools.name] = tools


def tool_format(name: str) -> CallFormat:
    """Returns a format by its registered name, or by `module:attribute`."""
    if name in TOOL_FORMATS:
        return TOOL_FORMATS[name]
    if ":" in name:
        return _imported(name)
    near = nearest(name, TOOL_FORMATS)
    raise ChatError(
        f"unknown tool format {name!r}\n"
        + (f"  did you mean: {near}?\n" if near else "")
        + f"  there are: {', '.join(sorted(TOOL_FORMATS))}; name one of your own as module:attribute"
    )


def detect(template_source: str) -> CallFormat:
    """Returns the format that a chat template shows. Most models whose template shows no calls were trained on the
    Hermes format as well. Raises ChatError if calls are shown in an unknown format."""
    for mark, tools in MARKS:
        if mark in template_source:
            return tools
    if LLAMA_CALL.search(template_source):
        return LLAMA3_JSON
    if WRITES_CALLS.search(template_source):
        marks = ", ".join(f"{mark} ({tools.name})" for mark, tools in MARKS)
        raise ChatError(
            "the chat template writes tool calls in a format that is not known\n"
            f"  looked for: {marks}\n"
            "  name its format, or a class of your own, in the server's config: models[].tool_format"
        )
    return HERMES


def _check_parts(tools: ToolParser) -> None:
    if missing := [part for part in PARTS if not hasattr(tools, part)]:
        raise ChatError(f"{tools!r} is not a tool format: it has no {', '.join(missing)} (see ToolParser)")
    if not (tools.markers or tools.openings):
        raise ChatError(
            f"the tool format {tools.name!r} has neither markers nor openings, so no call can be recognised"
        )


def _imported(name: str) -> CallFormat:
    """Imports a format and registers it, so that a second lookup returns the same object."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ChatError(
            f"the tool format {name!r} cannot be imported: {error}\n  is its module on PYTHONPATH?"
        ) from error
    tools = found() if isinstance(found, type) else found
    register(tools)
    TOOL_FORMATS[name] = tools
    return tools


for _, _one in MARKS:
    register(_one)
