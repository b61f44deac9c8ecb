"""A stand-in for the Hugging Face hub that keeps repositories in memory, for the real client to talk to."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from msgspec import Struct

USERS = {
    "hf_writer": {
        "name": "me",
        "orgs": [{"name": "org"}, {"name": "guarded"}],
        "auth": {"accessToken": {"role": "write"}},
    },
    "hf_reader": {"name": "me", "orgs": [{"name": "org"}], "auth": {"accessToken": {"role": "read"}}},
    "hf_stranger": {"name": "stranger", "orgs": [], "auth": {"accessToken": {"role": "write"}}},
}
COMMIT = "c" * 40
GUARDED = "guarded"
"""An organisation whose members may not make repositories."""


class Repository(Struct):
    is_private: bool
    files: dict[str, bytes]
    messages: list[str] = []


class Hub:
    """Its state. `on_upload` is what happens to large files: they are kept, refused, or never finished."""

    def __init__(self) -> None:
        self.is_hanging = threading.Event()
        self.release = threading.Event()
        self.url = ""
        self.forget()

    def forget(self) -> None:
        """It is empty, as at the start."""
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.on_upload = "keep"

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        path = path.partition("?")[0]
        if path.startswith("/upload/"):
            return self._upload(path.rpartition("/")[2], body)
        if token not in USERS:
            return 401, {"error": "Invalid credentials"}, {}
        if path == "/api/whoami-v2":
            return 200, USERS[token], {}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        parts = path.removeprefix("/api/models/").split("/")
        found = self.repositories.get("/".join(parts[:2]))
        if found is None:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        match method, parts[2:3]:
            case "GET", ["tree"]:
                tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in found.files]
                return 200, tree, {}
            case "POST", ["preupload"]:
                return 200, {"files": [_mode(file["path"]) for file in json.loads(body)["files"]]}, {}
            case "POST", ["commit"]:
                return self._commit("/".join(parts[:2]), body)
        return 200, {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": []}, {}

    def _create(self, request: Any) -> tuple[int, Any, dict[str, str]]:
        name = f"{request['organization'] or 'me'}/{request['name']}"
        if name.startswith(GUARDED):
            return 403, {"error": "You don't have the rights to create a model under this namespace"}, {}
        if name in self.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}, {}
        self.repositories[name] = Repository(request.get("visibility") == "private", {".gitattributes": b""})
        return 200, {"url": f"{self.url}/{name}"}, {}

    def _batch(self, request: Any) -> tuple[int, Any, dict[str, str]]:
        objects = []
        for one in request["objects"]:
            action = {"upload": {"href": f"{self.url}/upload/{one['oid']}"}}
            objects.append(one if one["oid"] in self.objects else {**one, "actions": action})
        return 200, {"transfer": "basic", "objects": objects}, {}

    def _upload(self, oid: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        if self.on_upload == "refuse" and self.uploads:
            return 400, {"error": "the storage is full"}, {}
        if self.on_upload == "hang" and self.uploads:
            self.is_hanging.set()
            self.release.wait(60)
        assert hashlib.sha256(body).hexdigest() == oid
        self.objects[oid] = body
        self.uploads.append(oid)
        return 200, {}, {}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        found = self.repositories[name]
        for line in map(json.loads, body.splitlines()):
            match line["key"], line["value"]:
                case "header", value:
                    found.messages.append(value["summary"])
                case "file", value:
                    found.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile", value:
                    found.files[value["path"]] = self.objects[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}, {}


def _mode(path: str) -> dict[str, Any]:
    is_large = path.endswith((".safetensors", ".png"))
    return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}


@contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, content, headers = hub.answer(self.command, self.path, token, self._body())
            body = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                pass  # the client was killed

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def do_GET(self) -> None:
            self.do_POST()

        def do_PUT(self) -> None:
            self.do_POST()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()
