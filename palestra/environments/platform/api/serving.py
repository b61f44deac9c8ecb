"""`palestra platform serve`: opens the pool, prints the address, serves until it is stopped, saves live instances to
disk.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from palestra.environments.platform.api.app import PlatformApp
from palestra.environments.platform.api.auth import PlatformAuth
from palestra.environments.platform.api.http import MAX_BODY_BYTES
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import PoolLimits
from palestra.net.serving import HttpServer

BACKLOG = 4096
KEY_BYTES = 24


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8030
    folder: Path | None = None
    """Folder in which instances are saved during a restart; None: they end with the process."""
    keys: tuple[str, ...] = ()
    public_url: str | None = None
    limits: PoolLimits = PoolLimits()

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def serve(settings: ServeSettings, ready: Callable[[str, str | None], None]) -> None:
    """`ready` gets the address, and the key if one had to be made."""
    listener = _bind(settings)
    try:
        with (
            InstancePool(settings.limits, settings.folder) as pool,
            asyncio.Runner(loop_factory=_loop_factory()) as runner,
        ):
            runner.run(_serve(settings, pool, listener, ready))
    finally:
        listener.close()


async def _serve(
    settings: ServeSettings, pool: InstancePool, listener: socket.socket, ready: Callable[[str, str | None], None]
) -> None:
    made = None if settings.keys or settings.is_loopback else f"plat-{secrets.token_urlsafe(KEY_BYTES)}"
    keys = (*settings.keys, *([made] if made else []))
    auth = PlatformAuth(keys, secret=pool.files.secret(), is_loopback=settings.is_loopback)
    server = HttpServer(
        PlatformApp(pool, auth, settings.public_url),
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        ws_max_size=MAX_BODY_BYTES,
        ws_per_message_deflate=False,  # frames are small, and the network is fast
        log_level="warning",
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    listener.listen(BACKLOG)
    ready(_url(listener), made)
    await server.serve([listener])


def _bind(settings: ServeSettings) -> socket.socket:
    """Binds before anything slow happens, so that a port in use is reported at once."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
    except (OSError, OverflowError) as e:
        answer = getattr(e, "strerror", None) or e
        raise PlatformError(
            f"cannot listen on {settings.host}:{settings.port} ({answer}); choose another --port"
        ) from e
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loop_factory():
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
