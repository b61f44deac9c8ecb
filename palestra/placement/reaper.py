"""A small process that outlives its parent for a moment, and kills what the parent has started when the parent has
ended in any way.

Our own programs notice by themselves that their parent is gone. Foreign programs do not, nor do their children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import IO

from palestra.util.processes import PIPE, spawn_blocking

# It imports nothing of Palestra, to be small. It reads lines `+group` and `-group`; at the end of input it kills the
# rest.
_PROGRAM = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class OrphanReaper:
    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process = self._started()

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._say(f"+{group}\n")

    def end(self, group: int) -> None:
        """Kills what is left of a group whose leader was waited for."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        self._groups.discard(group)
        self._say(f"-{group}\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        try:
            _write(self._process.stdin, line)
        except OSError:  # the reaper was killed
            self._process.wait()
            self._process = self._started()
            for group in self._groups:
                _write(self._process.stdin, f"+{group}\n")

    @staticmethod
    def _started() -> subprocess.Popen[bytes]:
        return spawn_blocking([sys.executable, "-I", "-S", "-c", _PROGRAM], stdin=PIPE)


def _write(pipe: IO[bytes] | None, line: str) -> None:
    assert pipe is not None
    pipe.write(line.encode())
    pipe.flush()
