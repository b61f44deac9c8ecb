"""Secrets in text, found and blacked out: for logs and for configs that are shown or saved.

Owns: what looks like a secret. Never touches: where the text goes.
"""

from __future__ import annotations

import re

REDACTED = "[redacted]"

# A name that says what follows is secret, in the ways text, JSON, repr, ASGI bytes and coloured terminals write it.
# Repetitions are bounded: a line may quote what a client sent, and must not take quadratic time.
_NAME = r"(?:api[-_]?key|authorization|password|secret|[?&](?:sig|signature|token|key))"
_BETWEEN = r"""(?:\\?["']|\x1b\[[\d;]*m|[\s:=,()\[\]]|b(?=["'])|Bearer\b){0,9}"""
_QUOTED = r"""(?<=["'])(?:[^"'\\\x1b\n]|\\[^"'])+"""
_BARE = r"""(?!(?:null|true|false|none)\b|(?<=":\ )-?\d)[^\s"'\\,;&(){}\[\]\x1b]+"""
_SECRETS = re.compile(
    rf"(?P<before>{_NAME}{_BETWEEN}[:=,]{_BETWEEN})(?:{_QUOTED}|{_BARE})"
    r"|(?P<url>://[^:/@\s]{0,99}:)[^@/\s]{1,999}(?=@)"
    r"|tml-[\w.~+/=%-]+"  # keys, ours and Tinker's; no word boundary: after an escaped line break there is none
    r"|ep-[\w-]{43}"  # of an episode's attempt
    r"|eyJ[\w.=-]{5,}",  # JSON web tokens
    re.IGNORECASE,
)


def redact(text: str) -> str:
    return _SECRETS.sub(lambda found: f"{found['before'] or found['url'] or ''}{REDACTED}", text)
