"""A model endpoint as a process of its own: says a letter in a box, sometimes breaks."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

FAULTS = {"429": 429, "500": 500}


async def complete(request: web.Request) -> web.StreamResponse:
    """`model` says how: `steady`, or `shaky`: every fifth answer is a 429, a 500 or garbage, one after the other."""
    body = await request.json()
    seen = request.app["seen"]
    seen[0] += 1
    await asyncio.sleep(request.app["delay_s"])
    if body["model"] == "shaky" and seen[0] % 5 == 0:
        kind = seen[0] // 5 % 3
        if kind == 0:
            return web.json_response({"error": "later"}, status=429, headers={"Retry-After": "0"})
        return web.json_response({"error": "no"}, status=500) if kind == 1 else web.Response(body=b"<html>")
    message = {"role": "assistant", "content": "\\boxed{B}"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return web.json_response(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )


async def models(request: web.Request) -> web.StreamResponse:
    return web.json_response({"data": []})


async def main(delay_s: float) -> None:
    app = web.Application()
    app["seen"], app["delay_s"] = [0], delay_s
    app.add_routes([web.post("/v1/chat/completions", complete), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
