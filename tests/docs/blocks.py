"""The commands that README and docs show, as they are written there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\s*$")
COMMENT = re.compile(r"^<!-- (not run|run with|typed|prints|file): (.+) -->$")
PROMPT = "$ "
SHELLS = ("console", "bash")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    comments: dict[str, str]

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        lines = self.text.splitlines()
        if self.language == "bash":
            return list(_joined(lines))
        return [command.removeprefix(PROMPT) for command in _joined(lines) if command.startswith(PROMPT)]


def pages() -> list[Path]:
    written = ["README.md", "CONTRIBUTING.md", "examples/README.md"]
    folders = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "integrations").glob("*/README.md"))]
    return [*(ROOT / name for name in written), *folders]


def blocks_of(page: Path) -> Iterator[Block]:
    """Those of a shell, and those that are to be saved as files."""
    comments: dict[str, str] = {}
    block: list[str] | None = None
    language, start = "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if block is not None and not line.startswith("```"):
            block.append(line)
        elif block is not None:
            if language in SHELLS or "file" in comments:
                name = page.relative_to(ROOT).as_posix()
                yield Block(name, start, language, "\n".join(block) + "\n", comments)
            block, comments = None, {}
        elif found := FENCE.match(line):
            block, language, start = [], found[1], number
        elif comment := COMMENT.match(line):
            comments[comment[1]] = comment[2]
        elif line.strip():
            comments = {}


def _joined(lines: list[str]) -> Iterator[str]:
    """Lines as commands: one that a shell would not yet run goes on with the next."""
    waiting = ""
    for line in lines:
        waiting += line
        if _is_whole(waiting.removeprefix(PROMPT)):
            yield waiting
            waiting = ""
        else:
            waiting += "\n"
    if waiting.strip():
        yield waiting


def _is_whole(command: str) -> bool:
    if command.endswith("\\"):
        return False
    if command.count("'") % 2 == 0 and command.count('"') % 2 == 0:
        return True
    checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
    return "unexpected EOF" not in checked.stderr
