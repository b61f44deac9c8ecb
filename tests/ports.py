"""Ports for servers that tests start."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from contextlib import suppress

SHARE = 2_000
WORKERS = 6
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
_first = 20_000 + _worker * SHARE
_ports = itertools.cycle(range(_first, _first + SHARE))
next(itertools.islice(_ports, secrets.randbelow(SHARE), None))  # two runs at once begin at different ports


def free_port() -> int:
    """It is bound later: no other test gets it soon, nor the system for whoever asks for any or connects."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable: the ports are endless")
