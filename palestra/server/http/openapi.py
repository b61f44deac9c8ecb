"""Descriptions of routes in the OpenAPI that FastAPI cannot derive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel

from palestra.util.json_types import JsonObject

Responses = dict[int | str, JsonObject]

JSON_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
"""The schema of routes that read their body themselves."""
LINES = "application/x-ndjson"
OR_LINES: Responses = {200: {"content": {"application/json": {}, LINES: {}}}}
"""The answer of routes with `format=jsonl`."""
OR_EVENTS: Responses = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
"""The answer of routes with `stream: true`."""


RECORDS = "#/components/schemas/"
"""Where records that are not pydantic models are described: see `describe`."""


def body_of(record: type[msgspec.Struct]) -> JsonObject:
    schema = {"$ref": RECORDS + record.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answer_of(record: type[msgspec.Struct]) -> Responses:
    return {200: {"content": {"application/json": {"schema": {"$ref": RECORDS + record.__name__}}}}}


def describe(app: FastAPI, bodies: Iterable[Any], answers: Iterable[Any]) -> None:
    """Adds the schemas of these types to the app's OpenAPI, when a client asks for it. Bodies have no other fields."""
    made = app.openapi

    def openapi() -> JsonObject:
        read = msgspec.json.schema_components(bodies, ref_template=RECORDS + "{name}")[1]
        components = msgspec.json.schema_components(answers, ref_template=RECORDS + "{name}")[1]
        for schema in read.values():
            if "properties" in schema:
                schema["additionalProperties"] = False
        document = made()
        document["components"]["schemas"].update(components | read)
        return document

    app.openapi = openapi


def refusals(envelope: type[BaseModel]) -> Responses:
    return {"4XX": {"model": envelope, "description": "Refused; after 429, try again later."}}
