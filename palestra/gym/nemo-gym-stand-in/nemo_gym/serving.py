"""A server of NeMo Gym's as a process of a gym: on the socket it was given, until the gym ends.

Owns: sessions, errors as answers, uvicorn, workers, noticing the gym's end. Never touches: what a server does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from aiohttp import ClientResponseError
from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware

from nemo_gym.calls import NUM_WORKERS_VARIABLE, close_client
from nemo_gym.global_config import DRY_RUN_KEY_NAME, get_global_config_dict

if TYPE_CHECKING:
    from nemo_gym.server_utils import SimpleServer

log = logging.getLogger("nemo_gym")

SOCKET_VARIABLE = "PALESTRA_GYM_SOCKET"
SECRET_VARIABLE = "PALESTRA_GYM_SECRET"
WORKER_VARIABLE = "IS_NEMO_GYM_FASTAPI_WORKER"
ENTRYPOINT_VARIABLE = "IS_NEMO_GYM_FASTAPI_ENTRYPOINT"
BAD_SETTINGS = 78  # EX_CONFIG: starting it again will not help
LIFE_VARIABLE = "PALESTRA_GYM_LIFE"
LIFE = os.environ.get(LIFE_VARIABLE) or uuid4().hex
"""Of this process, and of its workers."""
BEGINNINGS = ("/", "/seed_session", "/reset", "/aggregate_metrics", "/reverify_mode")
GONE = "the state of this session is gone: the server was started anew since. Play the rollout again"
LAST_S = 2.0
OPEN_FILES = 65_535


def is_nemo_gym_fastapi_worker() -> bool:
    return os.environ.get(WORKER_VARIABLE) == "1"


def is_nemo_gym_fastapi_entrypoint(file: str) -> bool:
    """Whether this is a worker, importing the file for its app."""
    return is_nemo_gym_fastapi_worker() and file.endswith(os.environ.get(ENTRYPOINT_VARIABLE, "\0"))


class _SessionIds:
    """Whoever has none gets one. It is set anew each time, so that every answer has the cookie.

    What such a server knows of a session is in its process. One that was killed and started again would go on with
    nothing, and judge a rollout it has not seen: instead, sessions of an earlier process are refused, and the rollout
    is played again."""

    def __init__(self, app: Any, has_state: bool) -> None:
        self._app = app
        self._has_state = has_state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        session = scope.get("session")
        if session is None:
            await self._app(scope, receive, send)
            return
        is_gone = bool(session.get("session_id")) and session.get("life") != LIFE
        if is_gone and self._has_state and scope["path"] not in BEGINNINGS:
            session["session_id"] = session["session_id"]
            await JSONResponse(GONE, status_code=500)(scope, receive, send)
            return
        session.update(session_id=session.get("session_id") or str(uuid4()), life=LIFE)
        await self._app(scope, receive, send)


class _Errors:
    """An exception is an answer, in the words of NeMo Gym."""

    def __init__(self, app: Any, name: str) -> None:
        self._app = app
        self._name = name

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        has_begun = False

        async def sent(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:
            if scope["type"] != "http" or has_begun:
                raise
            log.exception("%s: %s %s failed", self._name, scope["method"], scope["path"])
            await JSONResponse(self._told(error), status_code=500)(scope, receive, send)

    def _told(self, error: Exception) -> str:
        if isinstance(error, ClientResponseError):
            content = getattr(error, "response_content", error.message)
            return f"Hit an exception in {self._name} calling an inner server: {content}"
        return repr(error)


def add_sessions(app: FastAPI, name: str, has_state: bool = False) -> None:
    """The gym's secret signs the cookie: in NeMo Gym its name does, which everybody knows."""
    if any(one.cls is _SessionIds for one in app.user_middleware):
        return
    app.add_middleware(_SessionIds, has_state=has_state)  # the first added is the innermost
    app.add_middleware(SessionMiddleware, secret_key=cookie_key(name), session_cookie=name)


def cookie_key(name: str) -> str:
    return hashlib.sha256(f"cookie\0{name}\0{os.environ.get(SECRET_VARIABLE, '')}".encode()).hexdigest()


def add_exception_handling(app: FastAPI, name: str) -> None:
    """Innermost, so that an error's answer has the session's cookie too."""
    app.user_middleware.append(Middleware(_Errors, name=name))


def serve(server_class: type[SimpleServer]) -> FastAPI | None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    server = _made(server_class)
    settings = get_global_config_dict()
    if settings.get(DRY_RUN_KEY_NAME):
        return None
    app = server.setup_webserver()
    if getattr(server.config, "expose_tools_over_mcp", False):
        from nemo_gym.mcp_auto_exposure import maybe_auto_expose

        maybe_auto_expose(server, app)
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    _close_client_at_end(app)
    app.add_exception_handler(RequestValidationError, _told_invalid)
    if is_nemo_gym_fastapi_worker():
        return app
    _raise_file_limit()
    _run(server, app, shows_all=bool(settings.get("uvicorn_logging_show_200_ok")))
    return app


def _close_client_at_end(app: FastAPI) -> None:
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(served: Any) -> AsyncIterator[Any]:
        async with inner(served) as state:
            yield state
        await close_client()

    app.router.lifespan_context = lifespan


async def _told_invalid(request: Request, error: Any) -> Response:
    """To whoever reads the log, too: agents pass such an answer on without a word."""
    log.warning("%s got a body that does not fit: %s", request.url.path, error.errors())
    return await request_validation_exception_handler(request, error)


def _made(server_class: type[SimpleServer]) -> SimpleServer:
    from nemo_gym.server_utils import ServerClient

    try:
        config = server_class.load_config_from_global_config()
    except ValidationError as error:
        log.error("the config of this server is wrong: %s", error)
        sys.exit(BAD_SETTINGS)
    return server_class(config=config, server_client=ServerClient.load_from_global_config())


def _run(server: SimpleServer, app: FastAPI, shows_all: bool) -> None:
    import uvicorn

    workers = server.config.num_workers or 1
    config = uvicorn.Config(
        _import_string(server, workers) if workers > 1 else app,
        host=server.config.host,
        port=server.config.port,
        workers=workers,
        access_log=shows_all,
        log_level="info" if shows_all else "warning",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )
    listener = _listener(config)
    running = uvicorn.Server(config)
    if workers > 1:
        from uvicorn.supervisors import Multiprocess

        Multiprocess(config, target=running.run, sockets=[listener]).run()
        return
    if SOCKET_VARIABLE in os.environ:
        threading.Thread(target=_end_with_gym, args=(running,), daemon=True, name="gym-end").start()
    running.run(sockets=[listener])


def _listener(config: Any) -> socket.socket:
    given = os.environ.get(SOCKET_VARIABLE)
    if given is None:
        return config.bind_socket()
    listener = socket.socket(fileno=int(given))
    listener.set_inheritable(True)
    return listener


def _import_string(server: SimpleServer, workers: int) -> str:
    """Workers import the server's file by its place below the root."""
    entry = get_global_config_dict()[server.config.name]
    kind = next(iter(entry))
    file = f"{kind}/{next(iter(entry[kind]))}/{server.config.entrypoint}"
    os.environ |= {WORKER_VARIABLE: "1", ENTRYPOINT_VARIABLE: file, NUM_WORKERS_VARIABLE: str(workers)}
    os.environ[LIFE_VARIABLE] = LIFE
    return f"{file.removesuffix('.py').replace('/', '.')}:app"


def _end_with_gym(running: Any) -> None:
    """Nothing is ever said on the standard input; its end is the gym's."""
    with suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    running.should_exit = True
    threading.Event().wait(LAST_S)
    os._exit(0)


def _raise_file_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
