"""Links to workers on other machines: ZeroMQ over TCP, encrypted by CURVE, for processes that the server has started.

Each worker has a key of the server's for its link, and a key of its own for each of its lives. Both are derived from
the server's secret, so a server that was restarted knows its workers again. A key reaches its worker by the call that
starts it.

Owns: keys, who is admitted, ports. Never touches: messages.

A CURVE client that ZAP refuses once never reconnects: a worker's key is admitted before its link is bound. A worker is
identified by its life, never by its pid, which two machines may share.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from palestra.util.atomic_files import replacing

ADDRESS_FILE = "link.json"
ZAP_DOMAIN = b"palestra"


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """What one link needs."""

    context: zmq.Context
    secret_key: bytes

    @property
    def public_key(self) -> str:
        return zmq.curve_public(self.secret_key).decode()


class LinkNetwork:
    """The network over which workers elsewhere reach the server."""

    def __init__(self, host: str, secret: str):
        self.host, self._secret = host, secret.encode()
        self.context = zmq.Context()
        self._admitted: dict[str, bytes] = {}
        """The public key of the living worker, by name."""
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN.decode(), credentials_provider=self)

    def close(self) -> None:
        self._authenticator.stop()
        self.context.destroy(linger=500)

    def security(self, name: str) -> LinkSecurity:
        return LinkSecurity(self.context, self._key("link", name))

    def address(self, folder: Path) -> str:
        """An address that a restarted server finds again, unless another process has taken the port meanwhile."""
        file, port = folder / ADDRESS_FILE, 0
        try:
            known = json.loads(file.read_text())
            if known["host"] == self.host and _is_free(self.host, known["port"]):
                port = known["port"]
        except (OSError, ValueError, KeyError):
            pass
        if not port:
            port = _free_port(self.host)
            with replacing(file) as out:
                out.write(json.dumps({"host": self.host, "port": port}).encode())
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{port}"

    def admit(self, name: str, life: str) -> str:
        """Admits this life of a worker, and no other any more; returns its secret key."""
        key = self._key("life", name, life)
        self._admitted[name] = zmq.curve_public(key)
        return key.decode()

    def rank_key(self, name: str, life: str) -> str:
        """The secret key of rank 0 of a group, for its followers."""
        return self._key("ranks", name, life).decode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator, with the public key of who wants to connect."""
        return key in self._admitted.values()

    def _key(self, *names: str) -> bytes:
        return z85.encode(hmac.digest(self._secret, json.dumps(["palestra", *names]).encode(), hashlib.sha256))


def _free_port(host: str) -> int:
    with socket.socket(_family(host)) as one:
        one.bind((host, 0))
        return one.getsockname()[1]


def _is_free(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last server's connections may linger
        try:
            one.bind((host, port))
        except OSError:
            return False
        return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
