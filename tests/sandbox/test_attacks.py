"""What programs in a sandbox try, and do not get."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox import attacks
from tests.sandbox.conftest import SECRET, Box


class Outside:
    """What the owner has that nobody inside may reach."""

    def __init__(self, folder: Path) -> None:
        self.secret_file = folder / "secret"
        self.secret_file.write_text(SECRET)
        self.tcp = socket.create_server(("0.0.0.0", 0))
        self.abstract, self.path = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.name = f"palestra-test-{os.getpid()}"
        self.abstract.bind(f"\0{self.name}")
        self.path.bind(str(folder / "socket"))
        for one in (self.abstract, self.path):
            one.listen()

    def values(self) -> dict[str, object]:
        return {
            "user": getpass.getuser(),
            "secret_file": self.secret_file,
            "host": socket.gethostbyname(socket.gethostname()),
            "port": self.tcp.getsockname()[1],
            "abstract": self.name,
            "socket_file": self.path.getsockname(),
            "owner": os.getpid(),
        }

    def close(self) -> None:
        for one in (self.tcp, self.abstract, self.path):
            one.close()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    found = Outside(tmp_path_factory.mktemp("outside"))
    yield found
    found.close()


@pytest.mark.parametrize("attack", attacks.ATTACKS)
def test_the_wall_holds(box: Box, outside: Outside, attack: str) -> None:
    done = box.python(attacks.program(attack, **outside.values()))
    assert (done.text, done.stderr.decode()) == ("held\n", "")
