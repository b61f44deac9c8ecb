"""Model servers for tests, and endpoints that answer what a test wants, on real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from aiohttp import web

from palestra.gym.http_app import GymHttpApp, ServerEndpoint
from palestra.gym.models import OpenAIModel, VLLMModel
from palestra.gym.models.base import ModelServer
from palestra.gym.peers import GymPeers
from palestra.gym.records import GymConfig, ServerInstance, ServerKind
from palestra.gym.wire import GymRequest, GymResponse

Json = dict[str, Any]
Reply = Callable[[str, Json], Awaitable[web.StreamResponse]]

SECRET = "of these tests"
VLLM: Json = {
    "base_url": "http://127.0.0.1:1/v1",
    "api_key": "tml-test",
    "model": "ephebe",
    "return_token_id_information": False,
    "uses_reasoning_parser": True,
    "retry_wait_s": 0.001,
}
OPENAI: Json = {
    "openai_base_url": "http://127.0.0.1:1/v1",
    "openai_api_key": "tml-test",
    "openai_model": "ephebe",
    "retry_wait_s": 0.001,
}


def model(gym: Mapping[str, Any] | None = None, *, of: Json = VLLM, **settings: Any) -> ModelServer:
    """A server that nobody has started."""
    kind = VLLMModel if of is VLLM else OpenAIModel
    instance = ServerInstance(
        name="policy_model",
        kind=ServerKind.MODEL,
        implementation="vllm_model" if of is VLLM else "openai_model",
        settings={"entrypoint": "app.py", **of, **settings},
        host="127.0.0.1",
        port=1,
    )
    config = GymConfig(
        servers={instance.name: instance}, settings=dict(gym or {}), head_host="127.0.0.1", head_port=1, secret=SECRET
    )
    return kind(instance, GymPeers(config))


class Endpoint:
    """One that remembers what it was asked. `reply(path, body)` answers."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[tuple[str, Json]] = []
        self.url = ""

    @property
    def bodies(self) -> list[Json]:
        return [body for _, body in self.asked]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.path, body))
        return await self.reply(request.path, body)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/v1"
        try:
            yield self.url
        finally:
            await runner.cleanup()


def completion(content: str | None = "Hello.", **message: Any) -> Json:
    choice: Json = {
        "index": 0,
        "finish_reason": message.pop("finish_reason", "stop"),
        "message": {"role": "assistant", "content": content, **message},
    }
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    return {"id": "c", "object": "chat.completion", "created": 3, "model": "m", "choices": [choice], "usage": usage}


def always(answer: Any, status: int = 200, **more: Any) -> Reply:
    async def reply(path: str, body: Json) -> web.StreamResponse:
        del path, body
        return web.json_response(answer, status=status, **more)

    return reply


def in_turn(*answers: tuple[int, Any]) -> Reply:
    """Statuses and bodies; the last one for ever."""
    left = list(answers)

    async def reply(path: str, body: Json) -> web.StreamResponse:
        del path, body
        status, answer = left.pop(0) if len(left) > 1 else left[0]
        return web.json_response(answer, status=status)

    return reply


async def posted(server: ModelServer, path: str, body: Any, cookies: Mapping[str, str] | None = None) -> GymResponse:
    """As a peer in the same process would."""
    return await ServerEndpoint(server, SECRET).answer(GymRequest(path=path, body=body, cookies=cookies or {}))


def asked(reply: Reply, path: str, body: Any, **settings: Any) -> tuple[GymResponse, Endpoint]:
    """One call of a server in front of one endpoint."""

    async def main() -> tuple[GymResponse, Endpoint]:
        endpoint = Endpoint(reply)
        async with endpoint.serving() as url:
            key = "openai_base_url" if settings.get("of") is OPENAI else "base_url"
            server = model(**{key: url}, **settings)
            try:
                return await posted(server, path, body), endpoint
            finally:
                await server.close()

    return asyncio.run(main())


@contextmanager
def listening(server: ModelServer) -> Iterator[str]:
    """The server over HTTP, in a thread of its own."""
    config = uvicorn.Config(GymHttpApp(server, SECRET), host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    web_server = uvicorn.Server(config)

    async def main() -> None:
        await web_server.serve()
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    while not web_server.started:
        assert thread.is_alive(), "the model server did not start"
        threading.Event().wait(0.01)
    try:
        yield f"http://127.0.0.1:{web_server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        web_server.should_exit = True
        thread.join(10)
