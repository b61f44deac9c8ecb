"""JSON of answers: fast, and of any number that a client or a model may write."""

from __future__ import annotations

import json

import orjson


def dumps(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # whole numbers beyond 64 bits, which JSON has and orjson has not
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
