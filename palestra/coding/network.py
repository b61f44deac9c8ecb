"""Test scripts that need a network, which no sandbox has.

Owns: finding out. Never touches: running them.
"""

from __future__ import annotations

import re
from pathlib import Path

INSTALLS = re.compile(
    r"^\s*(?:sudo\s+|if\s+)?((?:apt-get|apt|apk|dnf|yum|brew)\s+(?:-\S+\s+)*(?:install|update|add)\b"
    r"|(?:curl|wget|uvx|npx)\s|uv\s+(?:add|pip|run|init|sync|venv|tool)\b|(?:python3?\s+-m\s+)?pip3?\s+install\b"
    r"|npm\s+(?:i|install|ci)\b|git\s+clone\s+\w+:)"
)


def needs_network(script: Path) -> str | None:
    """Returns the first line of a script that installs or downloads something, as a sentence; None: there is none."""
    for number, line in enumerate(script.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if INSTALLS.match(line):
            return f"{script}, line {number}: {line.strip()[:100]}"
    return None
