"""Cases: commands and what they should print, as a transcript of a terminal.

```text
$ python3 -c 'from slug import slug; print(slug("Two Words"))'
two-words
$ ./count.sh missing.txt
[2]
```

What follows a command is its standard output; a status that is not 0 stands in brackets in the last line. What is
expected never enters the sandbox, so a program there can only pass by printing it.
"""

from __future__ import annotations

import re
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path

from palestra.coding.errors import TaskError
from palestra.sandbox import ExecResult, Sandbox

PROMPT = "$ "
CASE_S = 10.0


@dataclass(frozen=True, slots=True)
class Case:
    command: str
    expected: str


@dataclass(frozen=True, slots=True)
class CaseResult:
    case: Case
    printed: str

    @property
    def is_passed(self) -> bool:
        return self.printed == self.case.expected


def read_cases(file: Path) -> list[Case]:
    """Reads a transcript. Raises TaskError if there is no command in it."""
    found: list[tuple[str, list[str]]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith(PROMPT):
            found.append((line.removeprefix(PROMPT), []))
        elif found:
            found[-1][1].append(line)
        elif line.strip():
            raise TaskError(f"{file}, line {number}: a transcript begins with a command: `{PROMPT}…`")
    if not found:
        raise TaskError(f"{file} has no command: lines that begin with `{PROMPT}`, each followed by its output")
    return [Case(command, _trimmed("\n".join(output))) for command, output in found]


async def run_cases(cases: list[Case], sandbox: Sandbox, limit_s: float) -> list[CaseResult]:
    """Runs all commands, one after the other, in one go: entering a sandbox takes longer than most of them."""
    mark = secrets.token_hex(16)
    lines = [
        f"timeout -k 1 {CASE_S:g} sh -c {shlex.quote(case.command)} </dev/null; printf '\\n%s %s\\n' {mark} $?"
        for case in cases
    ]
    done = await sandbox.exec("\n".join(lines), limit_s=limit_s)
    return _results(cases, done, mark)


def _results(cases: list[Case], done: ExecResult, mark: str) -> list[CaseResult]:
    """A command that is not answered has printed nothing that counts."""
    parts = re.split(rf"\n{mark} (\d+)\n", done.text)
    found: list[CaseResult] = []
    for index, case in enumerate(cases):
        if 2 * index + 1 < len(parts):
            output, status = parts[2 * index], int(parts[2 * index + 1])
            printed = _trimmed(output) + (f"\n[{status}]" if status else "")
            found.append(CaseResult(case, printed.lstrip("\n") if not output.strip("\n") else printed))
        else:
            found.append(CaseResult(case, "(it was not reached in time)"))
    return found


def _trimmed(text: str) -> str:
    return text.rstrip("\n")
