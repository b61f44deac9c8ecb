"""Cookies in HTTP headers."""

from __future__ import annotations

from collections.abc import Mapping
from http.cookies import SimpleCookie

UNSAFE = frozenset(' ",;\\\t\r\n')  # a value with these has to be quoted


def cookie_pair(name: str, value: str) -> str:
    if UNSAFE.isdisjoint(value) and value.isascii():
        return f"{name}={value}"
    return SimpleCookie({name: value})[name].OutputString()


def cookie_header(cookies: Mapping[str, str]) -> str:
    return "; ".join(cookie_pair(name, value) for name, value in cookies.items())


def cookies_of(header: str) -> dict[str, str]:
    """The cookies of a `Cookie` header."""
    if '"' in header:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    found: dict[str, str] = {}
    for part in header.split(";"):
        name, equals, value = part.partition("=")
        if equals:
            found[name.strip()] = value.strip()
    return found
