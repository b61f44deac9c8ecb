"""What the owner of sandboxes has and attacks try to reach: a secret file, and sockets of three kinds."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path

SECRET = "a-secret-of-the-owner"


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
