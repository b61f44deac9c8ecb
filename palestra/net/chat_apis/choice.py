"""Finds which API an endpoint speaks, and reads its refusals."""

from __future__ import annotations

from typing import Literal, get_args
from urllib.parse import urlsplit

from palestra.net.chat_apis.answers import ChatApi
from palestra.net.chat_apis.anthropic import AnthropicMessages
from palestra.net.chat_apis.openai import OpenAIChat

ApiName = Literal["auto", "openai", "anthropic"]
API_NAMES: tuple[str, ...] = get_args(ApiName)


def chat_api(name: ApiName, url: str) -> ChatApi:
    """`auto`: Anthropic's where Anthropic is, OpenAI's everywhere else."""
    host = urlsplit(url).hostname or ""
    if name == "anthropic" or (name == "auto" and _is_of(host, "anthropic.com")):
        return AnthropicMessages()
    return OpenAIChat(is_openai=_is_of(host, "openai.com"))


def endpoint_url(server: str) -> str:
    """The address of a server's model endpoint: where it names no path, it is at /v1, as everywhere."""
    server = server.rstrip("/")
    return server if urlsplit(server).path else f"{server}/v1"


def error_of(body: object) -> tuple[str, str] | None:
    """The message and the code in the body of a refusal; None if it has neither API's form."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return None
    return str(error["message"]), str(error.get("code") or "")


def _is_of(host: str, domain: str) -> bool:
    return host == domain or host.endswith(f".{domain}")
