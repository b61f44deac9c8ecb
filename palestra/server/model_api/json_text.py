"""Writes the JSON of answers: fast, and with any number that a client or a model may write."""

from __future__ import annotations

import json

import orjson


def dumps(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # whole numbers beyond 64 bits are valid JSON, but orjson does not write them
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
