"""One JSON call to a server, repeated while that may help."""

from __future__ import annotations

import asyncio
import time

import httpx

from palestra.util.backoff import Backoff, retry_after_s
from palestra.util.json_types import JsonObject

COME_BACK = {408, 409, 429, 500, 502, 503, 504, 529}
"""Statuses after which the same call may succeed; 529 is Anthropic's for an overloaded server."""
RETRIES = Backoff(0.2, 10.0)
DETAIL_LENGTH = 300


class CallFailure(Exception):
    """The call was refused, or not answered for too long; the message says where and why."""


async def post_json(http: httpx.AsyncClient, path: str, body: JsonObject, *, patience_s: float) -> JsonObject:
    """Returns the JSON object that is answered. Raises CallFailure after a refusal, or when the call has not succeeded
    for `patience_s`."""
    began_s = time.monotonic()
    for waits_s in RETRIES.pauses():
        try:
            got = await http.post(path, json=body)
        except httpx.TransportError as error:
            problem = f"does not answer: {str(error) or type(error).__name__}"
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise CallFailure(f"{http.base_url}: {error}") from None
        else:
            if got.is_success:
                return _content(got)
            problem = f"answers {got.status_code}: {_reason(got)}"
            if got.status_code not in COME_BACK:
                raise CallFailure(f"{got.url} {problem}")
            waits_s = max(waits_s, retry_after_s(got.headers.get("retry-after")))
        if time.monotonic() - began_s + waits_s > patience_s:
            raise CallFailure(f"{http.base_url}{path} {problem}; tried for {time.monotonic() - began_s:.0f} s")
        await asyncio.sleep(waits_s)
    raise AssertionError


def _content(got: httpx.Response) -> JsonObject:
    try:
        content = got.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise CallFailure(f"{got.url} answers {got.status_code}, but not with a JSON object")
    return content


def _reason(got: httpx.Response) -> str:
    """The `error.message` of OpenAI's and Anthropic's APIs, or the beginning of whatever is answered."""
    try:
        found = got.json()["error"]
        return str(found["message"] if isinstance(found, dict) else found)[:DETAIL_LENGTH]
    except (ValueError, KeyError, TypeError):
        return got.text[:DETAIL_LENGTH] or got.reason_phrase
