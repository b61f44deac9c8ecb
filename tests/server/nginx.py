"""nginx as a child process."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from palestra.util.programs import PROGRAMS, missing

AROUND = """
daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  {config}
}}
"""


@contextmanager
def nginx(folder: Path, config: str, port: int) -> Iterator[None]:
    """Runs it with what is written inside of `http`, until it answers at the port."""
    program = PROGRAMS["nginx"].find()
    if program is None:
        pytest.skip(str(missing("nginx")))
    (folder / "nginx.conf").write_text(AROUND.format(folder=folder, config=config))
    with subprocess.Popen([program, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log"]) as proxy:
        try:
            while True:
                assert proxy.poll() is None, (folder / "error.log").read_text()
                with socket.socket() as line:
                    if line.connect_ex(("127.0.0.1", port)) == 0:
                        break
            yield
        finally:
            proxy.terminate()
