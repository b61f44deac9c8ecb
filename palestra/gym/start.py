"""The start message of a process with servers: the whole gym, which servers it runs, their sockets.

It is sent through the process's standard input, which stays open afterwards: it closes when the starting process ends.
The environment or a file would not do, because the message has the gym's secrets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from palestra.gym.records import GymConfig

LENGTH_BYTES = 8
BAD_SETTINGS, BAD_CODE = 78, 70
"""Exit codes of a process that would fail again however often it is started (EX_CONFIG, EX_SOFTWARE)."""


class ProcessStart(Struct, frozen=True, kw_only=True):
    config: GymConfig
    sockets: dict[str, int]
    """Listening file descriptors of this process's servers, by name."""


def to_bytes(start: ProcessStart) -> bytes:
    body = msgspec.msgpack.encode(start, enc_hook=_to_plain)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def read_start(pipe: BinaryIO) -> ProcessStart:
    """Reads the message. Raises EOFError if the starting process is gone already."""
    length = int.from_bytes(_exactly(pipe, LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_exactly(pipe, length), type=ProcessStart, dec_hook=_from_plain)


def _exactly(pipe: BinaryIO, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = pipe.read(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _to_plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in a config")


def _from_plain(kind: type, value: Any) -> object:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} in a config")
