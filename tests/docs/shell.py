"""A shell for the commands of one page: in a scratch folder, with servers that run until the page ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tests.docs.blocks import ROOT

COMMAND_S = 900
READY_S = 180
STOP_S = 60
LINES = 100
READY = {
    "serve": "is ready at",
    "platform serve": "is ready at",
    "gym run": "servers ready",
    "episode watch": "",
}
"""Commands that run until they are stopped, and what they print when they are ready."""
SERVER = re.compile(rf"^(?:[\w./-]*/)?(?:palestra )?({'|'.join(READY)})\b(?!.* --dry-run)")
TRAIN = re.compile(r"^(?:[\w./-]*/)?palestra train\b")
TAIL = re.compile(r"""((?:[^#'"]|'[^']*'|"[^"]*"|(?<!\s)\#)*?)\s+\#.*""", re.DOTALL)
"""A command, and the comment behind it."""
STOPPED = {0, 130, -signal.SIGINT}


BASH = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("bash", ["bash", "--noprofile", "--norc"])
"""
"""A shell that Ctrl-C ends, also where these tests themselves run in the background of one."""


class Failed(AssertionError):
    pass


class Shell:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _fill(folder)
        self._said = folder.parent / f"{folder.name}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER_", "PALESTRA_"))}
        environment |= {"PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "120"}
        environment |= {"HOME": str(folder), "TERM": "dumb"}
        with self._said.open("wb") as output:
            self._bash = subprocess.Popen(
                [sys.executable, "-c", BASH],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        self._count = 0
        self._running: dict[str, int] = {}
        """Process groups in the background by what they are."""
        self._starting: set[str] = set()
        self._send("shopt -s expand_aliases; set -m -o pipefail")

    def run(self, command: str, comments: Mapping[str, str]) -> str:
        """Runs a command as it would be pasted: the one after a server that starts does not wait for it. Returns what
        was printed. Raises Failed with it."""
        command = _shortened(command, comments.get("run with", ""))
        plain = _plain(command)
        server = SERVER.match(plain)
        if server is None and not plain.endswith("&"):
            return self._foreground(command, comments.get("typed", ""))
        kind = server[1] if server else plain
        self.stop(kind)
        self._background(kind, plain.removesuffix("&").strip())
        return ""

    def settle(self) -> None:
        """Waits until the servers are ready that a block has started: who reads on has seen that they are."""
        end = time.monotonic() + READY_S
        for kind in self._starting:
            group = self._running[kind]
            while READY.get(kind, "") not in self._log(kind):
                if time.monotonic() > end or self._send(f"kill -0 {group} 2>/dev/null")[0] != 0:
                    raise Failed(f"{kind} is not ready:\n{self._log(kind)}")
                time.sleep(0.1)
        self._starting.clear()

    def close(self) -> None:
        """Ends all that runs, the newest first: watchers before the servers that they watch."""
        with ExitStack() as stack:
            assert self._bash.stdin is not None
            stack.callback(self._bash.wait, STOP_S)
            stack.callback(self._bash.stdin.close)
            for kind in self._running:
                stack.callback(self.stop, kind)

    def stop(self, kind: str) -> None:
        """Ends it as Ctrl-C would. Raises Failed where it does not end, or ends badly."""
        self._starting.discard(kind)
        group = self._running.pop(kind, None)
        if group is None:
            return
        try:
            code, said = self._send(f"kill -INT -- -{group} 2>/dev/null; wait {group}", STOP_S)
        except Failed as error:
            os.killpg(group, signal.SIGKILL)
            raise Failed(f"{kind} does not end:\n{self._log(kind)}") from error
        if code not in STOPPED:
            raise Failed(f"{kind} ended with {code}:\n{said}\n{self._log(kind)}")

    def _foreground(self, command: str, typed: str) -> str:
        """What is typed is typed again and again, for as long as the command asks."""
        lines = self.folder.parent / "typed.txt"
        lines.write_text(f"{typed}\n" * LINES if typed else "", encoding="utf-8")
        code, said = self._send(f"{{ {command}\n}} <{lines}", COMMAND_S)
        if code != 0:
            logs = "".join(f"\n--- {kind}:\n{self._log(kind)}" for kind in self._running)
            raise Failed(f"$ {command}\nended with {code}:\n{said[-4000:]}{logs}")
        return said

    def _background(self, kind: str, command: str) -> None:
        log = self._log_file(kind)
        code, said = self._send(f"{{ {command}\n}} </dev/null >{log} 2>&1 &\necho group $!")
        assert code == 0, said
        group = int(said.rpartition("group ")[2].split()[0])
        self._running[kind] = group
        self._starting.add(kind)

    def _send(self, text: str, limit_s: float = 60) -> tuple[int, str]:
        """The exit status, and what was printed meanwhile."""
        assert self._bash.stdin is not None
        begin = self._said.stat().st_size
        self._count += 1
        mark = f"<<{self._count} done>>"
        self._bash.stdin.write(f'{text}\necho "{mark} $?"\n'.encode())
        self._bash.stdin.flush()
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            said = self._said.read_bytes()[begin:].decode(errors="replace")
            if found := re.search(rf"{re.escape(mark)} (\d+)\n", said):
                return int(found[1]), said[: found.start()]
            if self._bash.poll() is not None:
                raise Failed(f"$ {text}\nended the shell:\n{said[-4000:]}")
            time.sleep(0.05)
        raise Failed(f"$ {text}\ndid not end within {limit_s:g} s:\n{said[-4000:]}")

    def _log(self, kind: str) -> str:
        file = self._log_file(kind)
        return file.read_text(errors="replace")[-4000:] if file.exists() else ""

    def _log_file(self, kind: str) -> Path:
        name = re.sub(r"\W+", "-", kind)[:40]
        return self.folder.parent / f"{self.folder.name}-{name}.log"


def _fill(folder: Path) -> None:
    """With links to what a checkout has."""
    folder.mkdir(parents=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tops = {path.partition("/")[0] for path in listed.splitlines()} | {".venv"}
    tops |= {".venv-vllm"} if (ROOT / ".venv-vllm").is_dir() else set()
    for top in tops:
        (folder / top).symlink_to(ROOT / top)


def _plain(command: str) -> str:
    found = TAIL.fullmatch(command)
    return found[1] if found else command.rstrip()


def _shortened(command: str, more: str) -> str:
    if not more:
        return command
    plain = _plain(command)
    body, background = plain.removesuffix("&").rstrip(), " &" if plain.endswith("&") else ""
    return f"{body} {more}{background}" if TRAIN.match(plain) else command
