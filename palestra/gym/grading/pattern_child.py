"""The process that searches for the regular expressions of rows: some never finish, so they run in a child process."""

from __future__ import annotations

import json
import re
import sys

MAX_MATCH = 10_000  # characters: a match is a letter, or the text of an option


def main() -> None:
    out = sys.stdout
    print("{}", file=out, flush=True)
    for line in sys.stdin.buffer:
        question = json.loads(line)
        found = [_last(pattern, question["text"]) for pattern in question["patterns"]]
        print(json.dumps(found), file=out, flush=True)


def _last(pattern: str, text: str) -> str | None:
    """Returns what the pattern's group matched, or the whole match if it has none. An invalid pattern matches
    nothing."""
    last: str | None = None
    try:
        for match in re.finditer(pattern, text, re.IGNORECASE):
            last = match[1] if match.re.groups else match[0]
    except (re.error, RecursionError, OverflowError):
        return None
    return None if last is None else last[:MAX_MATCH]


if __name__ == "__main__":
    main()
