"""A program that stands in for vLLM's server, which cannot be made to hang at will.

It says how it was started, then answers as vLLM does, or never: STAND_IN_HANGS is `start`, or `adapter` for samples
with one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANGS = os.environ.get("STAND_IN_HANGS")
FIRST = "stand-in: "
LAST = "INFO [shm_broadcast.py:705] No available shared memory broadcast block found in 60 seconds."


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if HANGS == "start":
            self.answer("", 503)
            return
        model = {"id": argument("--served-model-name"), "max_model_len": 512}
        found = {"/v1/models": {"data": [model]}, "/openapi.json": {"paths": {"/v1/load_lora_adapter": {}}}}
        self.answer(json.dumps(found.get(self.path, {})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if HANGS == "adapter" and body.get("model", "").startswith("palestra-"):
            print(LAST, flush=True)
            threading.Event().wait()
        logprobs = {"tokens": ["token_id:4"], "token_logprobs": [0.0], "top_logprobs": []}
        completion = json.dumps({"choices": [{"index": 0, "logprobs": logprobs}]})
        self.answer(f"data: {completion}\n\ndata: [DONE]\n\n" if body.get("stream") else completion)

    def answer(self, text: str, status: int = 200) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """The log is for what the test reads."""


def argument(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


if __name__ == "__main__":
    print(FIRST + json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)}), flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(argument("--port"))), Handler).serve_forever()
