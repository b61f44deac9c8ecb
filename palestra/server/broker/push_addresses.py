"""Addresses to which this server may send results. They come from trainers, so without a check they could reach any
host.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from palestra.server.core.errors import Refusal

MAX_LENGTH = 256
MAX_IPC_PATH = 100  # the system's limit is 107 bytes
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[1-9][0-9]{0,4})")


def check_address(where: str, address: str, hosts: Sequence[str]) -> None:
    """400 if it is not an address, or not allowed. `hosts` are allowed hosts other than this machine."""
    if len(address) > MAX_LENGTH:
        raise Refusal(400, f"{where}: at most {MAX_LENGTH} characters are allowed")
    if address.startswith("ipc://"):
        _check_file(where, address.removeprefix("ipc://"))
        return
    found = _TCP.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        shown = f"found {address[:80]!r}"
        raise Refusal(
            400, f"{where}: the trainer's address as tcp://host:port or ipc:///folder/file is needed; {shown}"
        )
    host = found["host"].strip("[]")
    if not _is_this_machine(host) and host not in hosts:
        allow = f"on a private network, the server's setting episodes.push_hosts=[{host}] allows it"
        raise Refusal(400, f"{where}: results are pushed to this machine only, not to {host}; {allow}")


def _check_file(where: str, path: str) -> None:
    """Checks that other users cannot put a socket of their own there."""
    file = Path(path)
    if not file.is_absolute() or ".." in file.parts or not path.isprintable() or len(path.encode()) > MAX_IPC_PATH:
        shown = f"found {path[:80]!r}"
        raise Refusal(400, f"{where}: ipc:// needs an absolute path of at most {MAX_IPC_PATH} bytes; {shown}")
    try:
        folder = file.parent.stat()
    except OSError:
        raise Refusal(400, f"{where}: there is no folder {file.parent} here; make one that only you can use") from None
    if folder.st_uid != os.getuid() or folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        detail = "others can write there; use a folder that only the server's user can write (mkdir -m 700)"
        raise Refusal(400, f"{where}: {file.parent} is not private, {detail}")


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
