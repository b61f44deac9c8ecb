"""Finds secrets in text and blacks them out, for logs and for configs that are shown or saved."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

import msgspec

REDACTED = "[redacted]"

# A name that says what follows is secret, in the ways text, JSON, repr, ASGI bytes and coloured terminals write it.
# Repetitions are bounded: a line may quote what a client sent, and must not take quadratic time.
_NAME = r"(?:api[-_]?key|authorization|password|secret|[?&](?:sig|signature|token|key))"
_BETWEEN = r"""(?:\\?["']|\x1b\[[\d;]*m|[\s:=,()\[\]]|b(?=["'])|Bearer\b){0,9}"""
_QUOTED = r"""(?<=["'])(?:[^"'\\\x1b\n]|\\[^"'])+"""
_BARE = r"""(?!(?:null|true|false|none)\b|(?<=":\ )-?\d)[^\s"'\\,;&(){}\[\]\x1b]+"""
# After a comma, as in the headers of ASGI, a word may be the next of a list of names: it must look like a secret.
_LIKELY = r"(?:(?<=Bearer\ )|(?=[a-z]{20}|[\w-]{0,40}\d))(?=[^\s,]{8})"
_SECRETS = re.compile(
    rf"(?P<before>{_NAME}{_BETWEEN}[:=]{_BETWEEN})(?:{_QUOTED}|{_BARE})"
    rf"|(?P<listed>{_NAME}{_BETWEEN},{_BETWEEN})(?:{_QUOTED}|{_LIKELY}{_BARE})"
    r"|(?P<url>://[^:/@\s]{0,99}:)[^@/\s]{1,999}(?=@)"
    r"|(?P<flag>--(?:[a-z]{1,20}-){0,3}key[= ])(?:'[^']+'|[^\s'-][^\s']*)"  # an option of a command
    r"|tml-[\w.~+/=%-]+"  # keys, ours and Tinker's; no word boundary: after an escaped line break there is none
    r"|ep-[\w-]{43}"  # of an episode's attempt
    r"|eyJ[\w.=-]{5,}"  # JSON web tokens
    r"|\b(?:sk-(?=[\w-]{0,40}\d)|hf_|gh[oprsu]_)[\w-]{20,}",  # OpenAI's and others', Hugging Face's, GitHub's
    re.IGNORECASE,
)


def redact(text: str) -> str:
    return _SECRETS.sub(
        lambda found: f"{found['before'] or found['listed'] or found['url'] or found['flag'] or ''}{REDACTED}", text
    )


_SECRET_FIELD = re.compile(
    r"(?:.*[-_])?(?:(?:api|secret|private|access)[-_]?key|(?:access|refresh|auth)[-_]?token|authorization|passw(?:or)?d|secret)",
    re.IGNORECASE,
)


class Mask:
    """Blacks out secrets, and text that matches further patterns, in what is shown or exported."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = [check_pattern(pattern) for pattern in patterns]

    def text(self, text: str) -> str:
        text = redact(text)
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text

    def of(self, value: object) -> Any:
        """A JSON value with secrets blacked out: in all of its texts, and the whole value of a field whose name says
        that it is secret. In our own records, names of fields and states stay: they are not secret, and programs read
        them."""
        if isinstance(value, Enum):
            return value
        if isinstance(value, msgspec.Struct):
            fields = {name: self.of(getattr(value, name)) for name in value.__struct_fields__}
            return msgspec.structs.replace(value, **fields)
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name): self._field(name, one) for name, one in value.items()}
        return [self.of(one) for one in value] if isinstance(value, list) else value

    def _field(self, name: str, value: object) -> Any:
        """The value of one field. A number with a fraction is never secret: a metric may be called `found_secret`."""
        is_secret = value and not isinstance(value, bool | float) and _SECRET_FIELD.fullmatch(name)
        return REDACTED if is_secret else self.of(value)


def check_pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    if pattern.search(""):
        raise ValueError(f"{text!r} matches empty text and so every place; make it match at least one character")
    return pattern
