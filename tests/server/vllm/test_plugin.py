"""The plugin in vLLM's own Python: what breaks off is taken up, what is damaged is fetched again or refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from palestra.server.vllm.process import install_plugin
from palestra.types.engine import PACKED_CONFIG

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

HEADER = json.dumps({"__metadata__": {PACKED_CONFIG: '{"r": 4}'}}).encode()
FILE = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(256)) * 100
DIGEST = hashlib.sha256(FILE).hexdigest()
PROGRAM = """
import asyncio, sys
from pathlib import Path
import palestra_lora
found = palestra_lora.PalestraResolver(sys.argv[1].split(","), "the key", sys.argv[2])
for name in sys.argv[3:]:
    try:
        lora = asyncio.run(found.resolve_lora("base", name))
    except RuntimeError as e:
        print("refused:", e)
        continue
    print("none" if lora is None else (Path(lora.lora_path) / "adapter_config.json").read_text())
"""


class Handler(BaseHTTPRequestHandler):
    """Each digest is answered in its own way; what was asked is kept."""

    asked: list[tuple[str, str, str]]

    def do_GET(self) -> None:
        digest, range_ = self.path.rpartition("/")[2], self.headers["range"]
        self.asked.append((digest, range_, self.headers["x-api-key"]))
        start = int(range_.removeprefix("bytes=").removesuffix("-"))
        times = sum(one[0] == digest for one in self.asked)
        if digest not in (DIGEST, DAMAGED):
            self.send_error(404)
            return
        data = FILE[start:]
        self.send_response(206)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if digest == DIGEST and times == 1:
            data = data[:1000]  # the connection breaks
        elif digest == DIGEST and times == 2:
            data = data[:-1] + b"!"
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


DAMAGED = "0" * 64


@pytest.fixture
def source() -> Iterator[ThreadingHTTPServer]:
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_adapters_are_taken_up_fetched_again_and_refused(source: ThreadingHTTPServer, vllm_python: str, tmp_path: Path):
    plugin, url = install_plugin(tmp_path / "plugin"), f"http://127.0.0.1:{source.server_address[1]}"
    names = [f"palestra-ab12-{DIGEST}", f"palestra-ab12-{DIGEST}-1", f"palestra-ab12-{DAMAGED}"]
    names += [f"palestra-ab12-{'1' * 64}", "somebody/else"]
    command = [vllm_python, "-c", PROGRAM, f"http://127.0.0.1:1,{url}", str(tmp_path / "adapters"), *names]
    done = subprocess.run(command, env={"PYTHONPATH": str(plugin)}, capture_output=True, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith(("{", "none", "refused"))]
    assert said[:2] == ['{"r": 4}', '{"r": 4}'], done.stderr
    assert "does not match its digest, 3 times in a row" in said[2]
    assert said[3].startswith("refused: http://127.0.0.1:1 does not answer")
    assert said[4] == "none"
    whole, rest = "bytes=0-", "bytes=1000-"
    assert [range_ for digest, range_, _ in Handler.asked if digest == DIGEST] == [whole, rest, whole]
    assert {key for *_, key in Handler.asked} == {"the key"}
    assert (tmp_path / "adapters" / DIGEST / "adapter_model.safetensors").read_bytes() == FILE
