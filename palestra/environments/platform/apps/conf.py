"""`conf`: the tools that MCP's public conformance suite asks a server for. Not listed among the apps; it has no tasks.

The suite looks for tools by name. Those that return text are here; what apps do not have (pictures, sound, resources,
prompts, questions back to the client) is not pretended.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping

import msgspec

from palestra.environments.platform.app import SeedSize, TaskApp
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import ToolOutput, tool
from palestra.util.json_types import JsonObject

SCHEMA = "CREATE TABLE notes (id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL);"

CONTACT: JsonObject = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "place",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "required": ["name"],
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"required": ["address"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
"""With the keywords of JSON Schema that the suite expects in tools/list."""


def fill(connection: sqlite3.Connection, rng: random.Random, size: SeedSize) -> Mapping[str, str]:
    connection.execute("INSERT INTO notes (text) VALUES (?)", (f"{size} {rng.randrange(100)}",))
    return {"LOGGED_IN_USER": "1", "LOGGED_IN_NAME": "Ada", "CURRENT_DATE": "2026-03-02"}


@tool()
def test_simple_text(context: ToolContext) -> ToolOutput:
    """Say something."""
    return {"text": "This is a simple text response for testing."}


@tool()
def test_error_handling(context: ToolContext) -> ToolOutput:
    """Fail, always."""
    raise ToolError("intended", "This tool intentionally returns an error for testing")


@tool()
def json_schema_2020_12_tool(
    context: ToolContext,
    name: str,
    address: dict[str, str] | None = None,
    phone: str | None = None,
    email: str | None = None,
) -> ToolOutput:
    """Take a contact, described by a rich schema."""
    return {"name": name, "address": address, "phone": phone, "email": email}


CONF = TaskApp(
    key="conf",
    title="Conformance",
    description="What MCP's conformance suite asks a server for.",
    version="v1",
    schema=SCHEMA,
    fill=fill,
    tools=(
        test_simple_text,
        test_error_handling,
        msgspec.structs.replace(json_schema_2020_12_tool, parameters=CONTACT),
    ),
    templates=(),
)
