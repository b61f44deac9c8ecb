"""A model endpoint that tells token ids, and does wrong where the first message asks for it. As a program: its address
on stdout, its end with stdin's."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from aiohttp import web

READ, SAID = 9, [20, 21]


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    messages: list[dict[str, Any]] = body["messages"]
    wish = str(messages[0]["content"])
    if "fail" in wish:
        return web.json_response({"error": "as you wished"}, status=422)
    if "slow" in wish:
        await asyncio.sleep(0.3)
    ids = [10, 11]
    before = [one for one in messages if one.get("generation_token_ids")]
    if before:
        ids = [*before[-1]["prompt_token_ids"], *before[-1]["generation_token_ids"], READ]
    if before and "break" in wish:
        ids = [10, 12, 13]
    message = {
        "role": "assistant",
        "content": "I say <tool_call> 1" if "call" in wish else "1",
        "prompt_token_ids": ids,
        "generation_token_ids": SAID,
        "generation_log_probs": [-0.5, None if "nan" in wish else -0.25],
    }
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return web.json_response({"id": "c", "object": "chat.completion", "created": 1, "choices": [choice]})


async def main() -> None:
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
