"""An endpoint of OpenAI's chat API whose model is a function of the conversation."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Policy = Callable[[list[dict[str, Any]]], Any]
"""From the messages to the text of the answer, or to a whole message, which may have tool calls."""


@contextmanager
def scripted_endpoint(policy: Policy) -> Iterator[str]:
    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = policy(request["messages"])
            message = {"role": "assistant", **(said if isinstance(said, dict) else {"content": said})}
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            facts = {"id": "x", "created": 0, "model": request["model"]}
            usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
            if request.get("stream"):
                calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or [])]
                delta = {**message, **({"tool_calls": calls} if calls else {})}
                choice = {"index": 0, "finish_reason": reason, "delta": delta}
                chunk = {**facts, "object": "chat.completion.chunk", "choices": [choice], "usage": usage}
                body, kind = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream"
            else:
                choice = {"index": 0, "finish_reason": reason, "message": message}
                whole = {**facts, "object": "chat.completion", "choices": [choice], "usage": usage}
                body, kind = json.dumps(whole).encode(), "application/json"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def tool_call(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"id": "call-1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"content": None, "tool_calls": [call]}
