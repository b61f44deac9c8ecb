"""A program in a pseudo-terminal, as a person sees and types."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread

from tests.waiting import until
from tests.warm_start import WarmProcess, start_in_terminal

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
END_S = 60.0


class Terminal:
    """`terminal.type("hello")`, `terminal.see("> ")`: waits until the text has come after what was seen before."""

    def __init__(self, process: WarmProcess, screen: int) -> None:
        self.process, self._screen = process, screen
        self.raw = ""
        """All that was written, with escapes."""
        self._seen = 0
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, text: str, end: str = "\n") -> None:
        os.write(self._screen, (text + end).encode())

    def see(self, text: str) -> str:
        """Returns what came up to the text."""
        until(lambda: self._find(text) >= 0, details=lambda: f"{text!r} in:\n{self.text[self._seen :]}")
        begin, end = self._seen, self._find(text) + len(text)
        self._seen = end
        return self.text[begin:end]

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self.raw).replace("\r\n", "\n")

    def end(self) -> int:
        """Returns the exit code."""
        code = self.process.wait(END_S)
        self._reader.join(END_S)
        return code

    def _find(self, text: str) -> int:
        return self.text.find(text, self._seen)

    def _read(self) -> None:
        while True:
            try:
                content = os.read(self._screen, 1 << 16)
            except OSError:  # the program has ended
                return
            if not content:
                return
            self.raw += content.decode(errors="replace")


@contextmanager
def palestra_in_terminal(*args: object, environment: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    screen, inner = os.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    own = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    with os.fdopen(inner, "r+b", buffering=0) as stream:
        env = {**own, "TERM": "xterm-256color", **(environment or {})}
        process = start_in_terminal(*map(str, args), screen=stream, env=env)
    terminal = Terminal(process, screen)
    try:
        yield terminal
    finally:
        process.kill()
        terminal.end()
        os.close(screen)
