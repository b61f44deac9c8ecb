"""A network between clients and a server that repeats, delays and loses what they say.

    with BadNetwork(server.url, seed=1) as network: EpisodeClient(network.url) ...

Only calls about episodes suffer. What happened how often is in `counts`.
"""

from __future__ import annotations

import http.client
import random
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

LATE_S = 0.3
HOP = ("connection", "transfer-encoding", "content-length", "keep-alive")


class BadNetwork:
    def __init__(self, server_url: str, *, seed: int):
        self._target = urlsplit(server_url).netloc
        self._luck, self._lock = random.Random(seed), threading.Lock()  # protects both
        self.counts: Counter[str] = Counter()
        self._copies: list[threading.Timer] = []
        network = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                network._pass_on(self)

            do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - their names there

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> BadNetwork:
        threading.Thread(target=self._server.serve_forever, name="bad network", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        """After the last copy has arrived."""
        for copy in self._copies:
            copy.join()
        self._server.shutdown()
        self._server.server_close()

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        fate = self._fate(handler.path)
        answer, response = self._send(handler, body)
        if fate == "twice":
            answer, response = self._send(handler, body)
        elif fate == "late":
            copy = threading.Timer(LATE_S, self._send, (handler, body))
            self._copies.append(copy)
            copy.start()
        if fate == "lost":
            handler.close_connection = True
            return
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP:
                handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(response)))
        handler.end_headers()
        handler.wfile.write(response)

    def _fate(self, path: str) -> str:
        with self._lock:
            is_hit = path.startswith("/episodes/") and self._luck.random() < 0.4
            fate = self._luck.choice(["twice", "late", "lost"]) if is_hit else "fine"
            self.counts[fate] += 1
            return fate

    def _send(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        upstream = http.client.HTTPConnection(self._target, timeout=90)
        try:
            headers = {name: value for name, value in handler.headers.items() if name.lower() not in HOP}
            upstream.request(handler.command, handler.path, body, headers)
            answer = upstream.getresponse()
            return answer, answer.read()
        finally:
            upstream.close()
