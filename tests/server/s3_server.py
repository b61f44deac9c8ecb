"""A real S3 server process: moto's, from a virtual environment of its own (`make test-storage`) or the path."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import fsspec
import httpx
import pytest

from tests.waiting import until

BUCKET = "palestra"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
_OWN = Path(__file__).parents[2] / ".venv-storage" / "bin" / "moto_server"


@dataclass(frozen=True)
class S3Server:
    port: int

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Settings of its clients, which may reach it through another port."""
        return KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}"}

    def objects(self, begin: str) -> dict[str, bytes]:
        """Objects of the bucket whose names begin so; without those that are deleted meanwhile."""
        address = f"http://127.0.0.1:{self.port}"
        files = fsspec.filesystem("s3", key="test", secret="test", endpoint_url=address, use_listings_cache=False)
        names = files.find(BUCKET, prefix=begin)
        found = files.cat(names, on_error="omit") if names else {}
        return {name: content for name, content in found.items() if isinstance(content, bytes)}


@contextmanager
def s3_server() -> Iterator[S3Server]:
    program = str(_OWN) if _OWN.exists() else shutil.which("moto_server")
    if program is None or find_spec("s3fs") is None:
        pytest.skip("no S3 server or client: make test-storage")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Without proxies and credentials of the machine's own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHONPATH"))}
    null = subprocess.DEVNULL
    process = subprocess.Popen([program, "-p", str(port)], stdout=null, stderr=null, env=environment)
    try:
        until(lambda: _answers(port, process))
        httpx.put(f"http://127.0.0.1:{port}/{BUCKET}", trust_env=False).raise_for_status()
        yield S3Server(port)
    finally:
        process.kill()
        process.wait()


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the S3 server ended"
    try:
        return httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).status_code < 500
    except httpx.HTTPError:
        return False
