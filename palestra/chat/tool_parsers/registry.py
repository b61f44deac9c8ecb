"""Tool formats by name, and by what a chat template writes.

Owns: the names. Never touches: how a format works.
"""

from __future__ import annotations

import re
from importlib import import_module

from palestra.chat.errors import ChatError
from palestra.chat.tool_parsers.glm import KEY, GlmToolParser
from palestra.chat.tool_parsers.hermes import HermesToolParser
from palestra.chat.tool_parsers.llama3_json import PYTHON_TAG, Llama3JsonToolParser
from palestra.chat.tool_parsers.mistral import MARKER, MistralToolParser
from palestra.chat.tool_parsers.protocol import ToolParser
from palestra.chat.tool_parsers.qwen_xml import FUNCTION, QwenXmlToolParser
from palestra.util.suggest import nearest

HERMES, LLAMA3_JSON, MISTRAL = HermesToolParser(), Llama3JsonToolParser(), MistralToolParser()
QWEN_XML, GLM = QwenXmlToolParser(), GlmToolParser()
LLAMA_CALL = re.compile(r'"name\\?": [^{}]{0,40}"parameters\\?": ')
"""As templates that ask for JSON describe a call."""
TOOL_FORMATS: dict[str, ToolParser] = {}
"""The formats that are known, by name."""


def register(tools: ToolParser) -> None:
    """One of the same name is replaced."""
    missing = [part for part in ("name", "markers", "openings", "tags", "block", "grammar") if not hasattr(tools, part)]
    if missing:
        raise ChatError(f"{tools!r} is no tool format: it has no {', '.join(missing)} (see ToolFormat)")
    if not (tools.markers or tools.openings):
        raise ChatError(f"nothing begins a call in the tool format {tools.name!r}: it has neither markers nor openings")
    TOOL_FORMATS[tools.name] = tools


def tool_format(name: str) -> ToolParser:
    """By the name it is registered with, or as `module:attribute`."""
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


def detect(template_source: str) -> ToolParser:
    """The format that a chat template shows. Most that show none were trained on Hermes' too."""
    if FUNCTION in template_source:
        return QWEN_XML
    if KEY in template_source:
        return GLM
    if any(marker in template_source for marker in HERMES.markers):
        return HERMES
    if MARKER in template_source:
        return MISTRAL
    if PYTHON_TAG in template_source or LLAMA_CALL.search(template_source):
        return LLAMA3_JSON
    return HERMES


def _imported(name: str) -> ToolParser:
    """Registered on the way, so that a second look finds the same one."""
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


for _one in (GLM, HERMES, LLAMA3_JSON, MISTRAL, QWEN_XML):
    register(_one)
