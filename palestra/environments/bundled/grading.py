"""What a reply says, as a number."""

from __future__ import annotations

import re

# Digits that belong to no decimal fraction; a minus counts where it cannot be the operator of "10-5". Possessive, so
# that a reply of nothing but digits takes linear time.
INTEGER = re.compile(r"(?:(?<!\w)-)?(?<![0-9])(?<![0-9]\.)[0-9]++(?!\.[0-9])")
MAX_DIGITS = 18  # more is no answer to anything asked here, and Python refuses to read thousands


def last_integer(text: str) -> int | None:
    """The last whole number in `text`; None where there is none, or it is absurdly long."""
    found = INTEGER.findall(text)
    return int(found[-1]) if found and len(found[-1]) <= MAX_DIGITS else None
