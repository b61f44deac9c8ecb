"""Test scripts that install something, though no sandbox has a network."""

from __future__ import annotations

import re
from pathlib import Path

INSTALLS = re.compile(
    r"^\s*(?:sudo\s+|if\s+|!\s+)*((?:apt-get|apt|apk|dnf|yum|brew)\s+(?:-\S+\s+)*(?:install|update|add)\b"
    r"|(?:curl|wget|uvx|npx)\s|uv\s+(?:add|pip|run|init|sync|venv|tool)\b|(?:python3?\s+-m\s+)?pip3?\s+install\b"
    r"|npm\s+(?:i|install|ci)\b|git\s+clone\s+\w+:)"
)
STOOD_IN_FOR = re.compile(
    r"^\s*(?:sudo\s+|if\s+|!\s+)*(?:apt(?:-get)?\s+(?:-\S+\s+)*update\b[^|]*$"
    r"|apt(?:-get)?\s+(?:-\S+\s+)*install\s+(?:(?:-\S+|curl|wget|ca-certificates|python3|python3-pip|python3-venv)\s*)+$"
    r"|curl\s.*astral\.sh/uv/.*\|\s*(?:ba)?sh\s*$|uvx\s|uv\s|pip3?\s+install\b)"
)


def installers(script: Path) -> tuple[bool, str | None]:
    """Returns whether a script installs something, and the first line for which there is no stand-in, if any."""
    found = False
    for number, line in enumerate(script.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if INSTALLS.match(line):
            found = True
            if not STOOD_IN_FOR.match(line):
                return found, f"{script}, line {number}: {line.strip()[:100]}"
    return found, None
