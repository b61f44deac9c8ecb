"""A server of NeMo Gym's as a process of a gym: on the socket it was given, until the gym ends."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.types import ASGIApp

from nemo_gym.calls import NUM_WORKERS_VARIABLE, close_client
from nemo_gym.global_config import DRY_RUN_KEY_NAME, get_global_config_dict
from nemo_gym.middleware import LIFE, LIFE_VARIABLE

if TYPE_CHECKING:
    from nemo_gym.server_utils import SimpleServer

log = logging.getLogger("nemo_gym")

SOCKET_VARIABLE = "PALESTRA_GYM_SOCKET"
WORKER_VARIABLE = "IS_NEMO_GYM_FASTAPI_WORKER"
ENTRYPOINT_VARIABLE = "IS_NEMO_GYM_FASTAPI_ENTRYPOINT"
BAD_SETTINGS = 78  # EX_CONFIG: starting it again will not help
LAST_S = 2.0
OPEN_FILES = 65_535
BOUNDED_HTTP_VARIABLE = "PALESTRA_BOUNDED_HTTP"


def is_nemo_gym_fastapi_worker() -> bool:
    return os.environ.get(WORKER_VARIABLE) == "1"


def is_nemo_gym_fastapi_entrypoint(file: str) -> bool:
    """Whether this is a worker, importing the file for its app."""
    return is_nemo_gym_fastapi_worker() and file.endswith(os.environ.get(ENTRYPOINT_VARIABLE, "\0"))


def serve(server_class: type[SimpleServer]) -> FastAPI | None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    server = _made(server_class)
    if get_global_config_dict().get(DRY_RUN_KEY_NAME):
        return None
    app = server.setup_webserver()
    if getattr(server.config, "expose_tools_over_mcp", False):
        from nemo_gym.mcp_auto_exposure import maybe_auto_expose

        maybe_auto_expose(server, app)
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    _close_client_at_end(app)
    app.add_exception_handler(RequestValidationError, _report_invalid)
    if is_nemo_gym_fastapi_worker():
        return app
    _raise_file_limit()
    _run(server, app)
    return app


def _close_client_at_end(app: FastAPI) -> None:
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(served: object) -> AsyncIterator[Any]:
        async with inner(served) as state:
            yield state
        await close_client()

    app.router.lifespan_context = lifespan


async def _report_invalid(request: Request, error: Any) -> Response:
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


def _run(server: SimpleServer, app: FastAPI) -> None:
    listener = _listener(server)
    workers = server.config.num_workers or 1
    if workers > 1:
        _run_workers(server, workers, listener)
        return
    _serve_on(app, listener)


def _listener(server: SimpleServer) -> socket.socket:
    """The gym's; where there is none around, its own."""
    given = os.environ.get(SOCKET_VARIABLE)
    if given is None:
        return socket.create_server((server.config.host, server.config.port))
    return socket.socket(fileno=int(given))


def _serve_on(app: ASGIApp, listener: socket.socket) -> None:
    import uvicorn

    shows_all = bool(get_global_config_dict().get("uvicorn_logging_show_200_ok"))
    config = uvicorn.Config(
        app,
        http=_bounded_http(),
        access_log=shows_all,
        log_level="info" if shows_all else "warning",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )
    running = uvicorn.Server(config)
    if SOCKET_VARIABLE in os.environ:
        _when_the_gym_ends(lambda: setattr(running, "should_exit", True))
    running.run(sockets=[listener])


def _bounded_http() -> Any:
    """Palestra's protocol, from its file: Palestra itself is not installed beside every server. Without a gym, and
    without httptools, uvicorn takes h11, which has bounds of its own."""
    file = os.environ.get(BOUNDED_HTTP_VARIABLE)
    if file is None:
        return "h11"
    spec = importlib.util.spec_from_file_location("palestra_bounded_http", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError:
        return "h11"
    return module.bounded_http(module.HttpBounds())


def _run_workers(server: SimpleServer, count: int, listener: socket.socket) -> None:
    """Until one ends: then all do, and the gym starts the server again. They import its file by its place below the
    root."""
    entry = get_global_config_dict()[server.config.name]
    kind = next(iter(entry))
    file = f"{kind}/{next(iter(entry[kind]))}/{server.config.entrypoint}"
    listener.set_inheritable(True)
    environment = {
        **os.environ,
        SOCKET_VARIABLE: str(listener.fileno()),
        WORKER_VARIABLE: "1",
        ENTRYPOINT_VARIABLE: file,
        NUM_WORKERS_VARIABLE: str(count),
        LIFE_VARIABLE: LIFE,
    }
    command = [sys.executable, "-c", f"from {__name__} import work; work()", file.removesuffix(".py").replace("/", ".")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _when_the_gym_ends(lambda: os._exit(0))  # their standard input ends with it
    workers = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
        for _ in range(count)
    ]
    try:
        os.wait()
        sys.exit("a worker ended")
    finally:
        for one in workers:
            one.terminate()


def work() -> None:
    """A worker: it serves the `app` of the module that it is told."""
    _serve_on(importlib.import_module(sys.argv[1]).app, socket.socket(fileno=int(os.environ[SOCKET_VARIABLE])))


def _when_the_gym_ends(end: Callable[[], None]) -> None:
    """Nothing is ever said on the standard input; its end is the gym's."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        end()
        threading.Event().wait(LAST_S)
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="gym-end").start()


def _raise_file_limit() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
