"""`palestra serve`: opens everything, prints the address, serves until it is stopped, and cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable

import structlog

from palestra.chat.errors import ChatError
from palestra.config.serve import ModelConfig, ServeConfig
from palestra.net.serving import HttpBounds, HttpServer
from palestra.server.app import StartingGate, create_app
from palestra.server.core.telemetry.disk_health import DiskHealth
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.core.workers.supervisor import WorkerError
from palestra.server.engines import PreloadedWorkers
from palestra.server.http.logs import set_up_logs
from palestra.server.listeners import BACKLOG, Listeners, ServeError, bind
from palestra.server.services import ServerServices
from palestra.store import Store
from palestra.store.errors import JournalError, StoreError, StoreTooNew
from palestra.store.queries.keys import create_key, list_keys
from palestra.store.records import Rights
from palestra.util.object_storage import StorageError
from palestra.util.service_manager import notify

log = structlog.get_logger()


STANDBY_S = 0.5  # how often a standby looks whether the active server is gone
GARBAGE_AFTER = 10_000
"""Number of new objects before the garbage collector runs. Python's default of 700 is reached during the calls of 64
clients, and costs a sixth of their CPU."""


def run(config: ServeConfig, listeners: Listeners, *, with_parent: bool = False) -> int:
    """Runs the server. `with_parent`: stop when stdin closes, which happens when the process at its other end is
    gone."""
    set_up_logs(config.log_level, as_json=config.log_json)
    _raise_file_limit()
    gc.set_threshold(GARBAGE_AFTER)
    gc.freeze()  # imported objects stay, and need not be examined for garbage again
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(config, listeners, with_parent))
    except ModuleNotFoundError as e:
        if config.otlp_endpoint is None or not (e.name or "").startswith("opentelemetry"):
            raise
        print("error: otlp_endpoint needs: pip install 'palestra[otel]'", file=sys.stderr)  # noqa: T201
        return 1
    except (ServeError, ChatError, StoreError, JournalError, StorageError, WorkerError, PermissionError) as e:
        print(f"error: {e}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


async def _serve(config: ServeConfig, listeners: Listeners, with_parent: bool) -> None:
    try:
        if not config.models:
            raise ServeError(
                "there is no model to serve; type: palestra serve --model DIR (palestra model random DIR makes one)"
            )
        if troubles := await DiskHealth.of(config).troubles():
            raise ServeError(
                f"cannot write where the config says ({config.state}): {'; '.join(troubles)}; free some space, or name "
                "another folder (--state, --checkpoints)"
            )
        tls = _tls_context(config)
        # Our own processes know neither the authority of the certificate nor a name that it is valid for.
        own = listeners.sockets[0] if tls is None else bind("127.0.0.1", 0, "address")
    except ServeError:
        listeners.close()
        raise
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if with_parent:
        loop.add_reader(sys.stdin.fileno(), stop.set)  # nothing is ever written: readable means closed
    try:
        await _until_stopped(config, listeners, own, tls, stop)
    finally:
        own.close()
        listeners.close()


async def _until_stopped(
    config: ServeConfig,
    listeners: Listeners,
    own: socket.socket,
    tls: ssl.SSLContext | None,
    stop: asyncio.Event,
) -> None:
    """`own`: where processes of this server reach it without TLS; the first of `listeners`, if they have none."""
    gate = StartingGate(listeners.opened)
    running: list[tuple[HttpServer, asyncio.Task[None]]] = []

    def listen(sockets: list[socket.socket], tls: ssl.SSLContext | None) -> None:
        server = HttpServer(
            gate,
            bounds=HttpBounds(head_timeout_s=config.limits.head_timeout_s),
            ws="none",  # clients that try one are told to send requests instead
            backlog=BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            lifespan="off",
            server_header=False,
            log_config=None,
            ssl_context_factory=None if tls is None else lambda *_: tls,
            forwarded_allow_ips=config.trusted_proxies,
        )
        for one in sockets:
            one.listen(BACKLOG)
        running.append((server, asyncio.create_task(server.serve(sockets))))

    def open_for_engines(services: ServerServices) -> None:
        """Engines that start need the server, so it is there before them."""
        gate.engines = services.engines.read
        gate.app = create_app(services)

    async def close() -> None:
        for server, _ in running:
            server.should_exit = True
        await asyncio.gather(*(serving for _, serving in running))

    listen(listeners.sockets, tls)
    if own not in listeners.sockets:
        listen([own], None)
    urls = [_url(listener, has_tls=tls is not None) for listener in listeners.sockets]
    preloaded = PreloadedWorkers()
    try:
        store = await _open_store(config, gate, preloaded, urls[0], stop)
        if store is None:
            return
        gate.begin_start()
        is_replaced = asyncio.Event()
        store.on_lock_lost = _threadsafe(lambda: (is_replaced.set(), stop.set()))
        started = time.monotonic()
        async with ServerServices.open(
            config, store, own_url=_own_url(own), before_engines=open_for_engines, preloaded=preloaded
        ) as services:
            first_key = await _first_key(config, services.store)
            gate.is_open = True
            _announce(services, urls, first_key, time.monotonic() - started)
            notify("READY=1")
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({stopping, *(serving for _, serving in running)}, return_when=asyncio.FIRST_COMPLETED)
            log.info("stopping")
            notify("STOPPING=1")
            await services.agentjet_trainer.close()  # while the server still runs, so that the trainer can log off
            services.begin_shutdown()
            stopping.cancel()
            await close()
        if is_replaced.is_set():
            raise ServeError("the connection to the database was lost, and another server has taken over")
    finally:
        preloaded.end()
        await close()


async def _open_store(
    config: ServeConfig, gate: StartingGate, preloaded: PreloadedWorkers, url: str, stop: asyncio.Event
) -> Store | None:
    """Returns the database with its lock. A standby waits for it as long as another server has it, or the database
    cannot be reached; None: it was stopped meanwhile."""
    is_announced = False
    while True:
        try:
            return await asyncio.to_thread(Store.open, config.database, patience_s=config.write_wait_s)
        except StoreTooNew:
            raise
        except StoreError as e:
            if not config.standby:
                raise
            if gate.standing_by != (reason := f"standing by: {e}"):
                gate.standing_by = reason
                log.info("standing by", reason=str(e))
        if not is_announced:
            is_announced = True
            _warn_about_standby(config)
            if config.preload and config.ray is None:
                preloaded.start(config)
            print(f"Palestra stands by at {url}", flush=True)  # noqa: T201
            notify("READY=1")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STANDBY_S):
                await stop.wait()
            return None


def _warn_about_standby(config: ServeConfig) -> None:
    if config.journal != "database" or config.snapshots is None:
        log.warning(
            "this standby can go on with models in training only if it has the state folder of the active server; for "
            "another machine set journal=database and snapshots=URL, on both"
        )


def _threadsafe(call: Callable[[], object]) -> Callable[[], None]:
    """Returns a function that other threads may call to have this done on the event loop."""
    loop = asyncio.get_running_loop()

    def soon() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call)

    return soon


def _tls_context(config: ServeConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without the function it would ask at the terminal for a password.
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")
    except OSError as e:  # SSLError is one
        files = f"{config.tls_cert}{'' if config.tls_key is None else f' and {config.tls_key}'}"
        reason = "they are not a PEM certificate and its key" if isinstance(e, ssl.SSLError) else e.strerror
        raise ServeError(f"cannot serve TLS with {files}: {reason}") from e
    return context


def _url(listener: socket.socket, *, has_tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if has_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _own_url(listener: socket.socket) -> str:
    """The address for processes on this machine."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _first_key(config: ServeConfig, store: Store) -> str | None:
    """Makes a key at the first start if the address is not loopback, because a key is needed there."""
    if config.is_loopback and config.require_key == "auto":
        return None
    if await store.read(list_keys):
        return None
    new = await store.write(lambda c: create_key(c, name="first", owner="admin", rights=Rights.ADMIN, now=time.time()))
    return new.text


def _announce(services: ServerServices, urls: list[str], first_key: str | None, seconds: float) -> None:
    """`urls`: the server's own, and TinkerScript's if there is one."""
    names = ", ".join(_served(services.served, model) for model in services.config.models)
    besides = "".join(f"; TinkerScript at {url}" for url in urls[1:])
    if first_key is not None:
        print(f"admin key (shown this once): {first_key}", flush=True)  # noqa: T201
    print(f"Palestra is ready at {urls[0]} after {seconds:.1f} s, serving {names}{besides}", flush=True)  # noqa: T201


def _served(served: ServedModels, model: ModelConfig) -> str:
    card = served.by_name[model.name[0]].card
    where = "" if card is None else f" ({card.device}, {card.dtype})"
    return ", ".join(model.name) + where


def _loop_factory():
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _raise_file_limit() -> None:
    """Raises the limit of open files: a client may hold thousands of polls open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 65536 if hard == resource.RLIM_INFINITY else hard
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
