"""Plays a task of verifiers by hand: an endpoint whose model is a person."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.verifiers.host_process import VerifiersHost
from palestra.environments.verifiers.settings import settings_of
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.verifiers.outcomes import VerifiersOutcome, attempt_of, request_of
from palestra.types.rollouts import Message, Task

Ask = Callable[[Sequence[Message]], str]
"""Shows a conversation to a person and returns what the person types."""


async def play_by_hand(entry: EnvironmentEntry, task: Task, ask: Ask) -> VerifiersOutcome:
    """Raises EnvironmentFailure."""
    settings = RolloutSettings(max_tokens=4096, max_context=1 << 20)
    with tempfile.TemporaryDirectory() as folder, _endpoint(ask) as url:
        async with VerifiersHost(entry.name, settings_of(entry), Path(folder) / "verifiers.log") as host:
            request = request_of(task, settings, url, "person")
            (outcome,) = await host.call("play", **request, attempts=[attempt_of(None, 0)])
    return msgspec.convert(outcome, VerifiersOutcome)


@contextmanager
def _endpoint(ask: Ask) -> Iterator[str]:
    one_at_a_time = threading.Lock()  # a person reads one conversation at a time

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one_at_a_time:
                message = {"role": "assistant", "content": ask(request["messages"])}
            kind, body = _answer(message, is_streamed=bool(request.get("stream")))
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Calls are not logged: the terminal is the person's."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, name="person's endpoint", daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()


def _answer(message: Message, *, is_streamed: bool) -> tuple[str, bytes]:
    """Returns the type and the bytes of a chat completion, as one chunk if it is to be a stream."""
    name, kind = ("delta", "chat.completion.chunk") if is_streamed else ("message", "chat.completion")
    choice = {"index": 0, "finish_reason": "stop", name: message}
    answer = {"id": "0", "object": kind, "created": 0, "model": "person", "choices": [choice]}
    if is_streamed:
        return "text/event-stream", f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode()
    return "application/json", json.dumps(answer).encode()
