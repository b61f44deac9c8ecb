"""Log files of child processes: opening, rotating, reading their end."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 8 << 20  # a log longer than this is set aside at the next start
LAST_WORDS_BYTES = 4096
ERROR, ERROR_BYTES = re.compile(r"(\[[^\]]*\] )?error:"), 64 << 10
"""How a line begins that says why a process cannot go on; what is in brackets says where it ran."""


def open_log(file: Path) -> BinaryIO:
    """Opens a log file for appending; a long one is renamed first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.stat().st_size > MAX_LOG_BYTES:
        file.replace(f"{file}.1")
    return file.open("ab")


def last_lines(file: Path, size_bytes: int = LAST_WORDS_BYTES) -> list[str]:
    """The last lines of a file, within this number of bytes from its end."""
    try:
        with file.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - size_bytes))
            return f.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return []


def last_error(file: Path, since: int = 0) -> str | None:
    """The text after the last `error:` at the beginning of a line. `since`: bytes of the file to skip."""
    lines = last_lines(file, min(file.stat().st_size - since, ERROR_BYTES))
    places = [place for place, line in enumerate(lines) if ERROR.match(line)]
    return ERROR.sub("", "\n".join(lines[places[-1] :]), count=1).strip() if places else None


def last_output(file: Path) -> str:
    lines = last_lines(file)
    return lines[-1] if lines else f"it printed nothing; see {file}"
