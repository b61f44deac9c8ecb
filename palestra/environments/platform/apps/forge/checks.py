"""Whether a branch passes its checks: a plain function of its files, so that making a check pass is a real task."""

from __future__ import annotations

import re
from collections.abc import Mapping

SETTINGS, CONSTANTS, MAIN, VERSION, CHANGELOG = "settings.cfg", "constants.py", "main.py", "VERSION", "CHANGELOG.md"


def failed_checks(files: Mapping[str, str]) -> list[str]:
    """Returns the failed checks in words, empty if all pass. `files` maps paths to contents."""
    lines = (line for line in files.get(SETTINGS, "").splitlines() if line.strip())
    found = [
        f"{SETTINGS}: {line!r} is not `name = number`" for line in lines if not re.fullmatch(r"[a-z_]+ = \d+", line)
    ]
    defined = set(re.findall(r"^([A-Z_]+) = ", files.get(CONSTANTS, ""), re.MULTILINE))
    used = set(re.findall(r"\bconstants\.([A-Z_]+)", files.get(MAIN, "")))
    found += [f"{MAIN}: {name} is not in {CONSTANTS}" for name in sorted(used - defined)]
    version = files.get(VERSION, "").strip()
    if version not in files.get(CHANGELOG, "").partition("\n")[0]:
        found.append(f"{CHANGELOG}: the first line does not name version {version}")
    return found
