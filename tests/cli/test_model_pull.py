"""`palestra model pull` against a stand-in for the hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.test_cli import palestra

COMMIT = "a" * 40


def serve_hub(folder: Path) -> ThreadingHTTPServer:
    """`here/model` is the folder; `here/gated` needs a token; there is nothing else."""

    class Hub(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if "here/gated" in path:
                return self.answer(401, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted.")
            if "here/model" not in path:
                return self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            files = sorted(file for file in folder.iterdir() if file.is_file())
            if path.startswith("/api/models/here/model/tree/"):
                tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f)} for f in files]
                return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            if path.startswith("/api/models/here/model"):
                siblings = [{"rfilename": file.name} for file in files]
                info = {"id": "here/model", "modelId": "here/model", "sha": COMMIT, "siblings": siblings}
                return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
            file = folder / path.rsplit("/", 1)[-1]
            return self.answer(200, file.read_bytes(), ETag=f'"{_etag(file)}"', X_Repo_Commit=COMMIT)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(micro_model: Path) -> Iterator[str]:
    server = serve_hub(micro_model)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(tmp_path: Path, endpoint: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its settings once."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", **more}
    command = [sys.executable, "-m", "palestra.cli", "model", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | settings)


def test_a_model_is_fetched_and_then_known_by_its_id(hub, tmp_path, monkeypatch):
    done = run(tmp_path, hub, "pull", "here/model", "--json")
    assert done.returncode == 0, done.stderr
    folder = Path(json.loads(done.stdout)["folder"])
    assert (folder / "model.safetensors").is_file()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    shown = palestra("model", "info", "here/model", "--json")
    assert json.loads(shown.stdout)["family"] == "qwen3"


@pytest.mark.parametrize(
    ("hub_id", "parts"),
    [
        ("here/gated", ["here/gated is gated", "accept its terms", "HF_TOKEN"]),
        pytest.param("here/none", ["there is no model here/none", "private"], marks=pytest.mark.slow),
        pytest.param("not an id", ["'not an id' is not an id of the hub"], marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_fetched_is_one_clear_line(hub, tmp_path, hub_id, parts):
    check_line(run(tmp_path, hub, "pull", hub_id), parts)


def test_without_a_network_it_says_so_in_one_line(tmp_path):
    check_line(run(tmp_path, "http://127.0.0.1:9", "pull", "here/model"), ["is there a network?"])


def test_a_model_that_is_not_in_the_cache_says_how_to_fetch_it(tmp_path):
    check_line(run(tmp_path, "http://127.0.0.1:9", "info", "here/model"), ["palestra model pull here/model"], code=2)


def check_line(done: subprocess.CompletedProcess[str], parts: list[str], code: int = 1) -> None:
    assert done.returncode == code
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr
