"""A model endpoint that takes no time: fixed answers, tool calls first, then a message.

    python benchmarks/peers/gym_stub.py

It prints its address. The model's name says what it does: `tools-2-text` calls a tool twice before it speaks,
`tools-2-ids` does it with token ids and logprobs, as vLLM gives them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

PROMPT_TOKENS, MADE_TOKENS = 400, 60
"""Of the first prompt, and of each answer; each later prompt has the earlier ones and a tool's output before it."""
GROWTH = MADE_TOKENS + 40


def completion(turn: int, tools: int, with_ids: bool) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": "It is cold." if turn >= tools else None}
    if turn < tools:
        function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "tool_calls" if turn < tools else "stop"}
    prompt_tokens = PROMPT_TOKENS + turn * GROWTH
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": MADE_TOKENS,
        "total_tokens": prompt_tokens + MADE_TOKENS,
    }
    body: dict[str, Any] = {"id": "c", "object": "chat.completion", "created": 1, "model": "stub", "usage": usage}
    if with_ids:
        made = [1000 + n for n in range(MADE_TOKENS)]
        choice["token_ids"] = made
        choice["logprobs"] = {"content": [{"token": f"token_id:{one}", "logprob": -0.25} for one in made]}
        body["prompt_token_ids"] = list(range(prompt_tokens))
    return json.dumps({**body, "choices": [choice]}).encode()


class Stub(asyncio.Protocol):
    """HTTP/1.1 as far as it is needed: requests with a length, connections kept."""

    answers: dict[tuple[int, int, bool], bytes] = {}  # noqa: RUF012

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._data = transport, b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, rest = self._data.partition(b"\r\n\r\n")
            _, _, length = head.lower().partition(b"content-length:")
            size = int(length.split(b"\r\n", 1)[0] or 0) if length else 0
            if len(rest) < size:
                return
            self._data = rest[size:]
            body = self._answer(rest[:size]) if head.startswith(b"POST") else b'{"data":[]}'
            lines = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self._transport.write(lines + body)

    def _answer(self, body: bytes) -> bytes:
        name = body.partition(b'"model":"')[2].partition(b'"')[0].decode().split("-")
        key = (body.count(b'"role":"tool"'), int(name[1]), name[-1] == "ids")
        if key not in self.answers:
            self.answers[key] = completion(*key)
        return self.answers[key]


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it goes


if __name__ == "__main__":
    asyncio.run(main())
