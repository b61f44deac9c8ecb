"""Lets a sampler elsewhere join a running server: it is admitted by HTTP, and gets what its engine starts with."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from palestra import __version__
from palestra.types.engine import ReplicaTicket, WorkerConfig
from palestra.util.json_types import JsonMapping, JsonObject
from palestra.util.model_fingerprint import model_fingerprint

ANSWER_S = 120.0  # the server may have to read its own model first
ASK_AGAIN_S = 1.0


class JoinRefused(Exception):
    """The server does not admit this replica."""


class WrongReplica(JoinRefused, ValueError):
    """It asks for what the server does not have."""


class ReplicaAdmission(msgspec.Struct):
    """The server's answer, `JoinAnswer`."""

    base_model: str
    port: int
    server_key: str
    replica_id: str
    signature: str
    key_id: int
    settings: JsonObject


def join(
    server: str, key: str | None, folder: Path, name: str | None, wait_s: float, tell: Callable[[str], None]
) -> ReplicaAdmission:
    """Raises JoinRefused, and ConnectionError if the server never answers. `tell`: it is waited for, and why."""
    body = {"base_model": name, "fingerprint": model_fingerprint(folder), "version": __version__}
    until, is_told = time.monotonic() + wait_s, False
    while True:
        try:
            got = httpx.post(
                f"{server.rstrip('/')}/engine/replicas", json=body, headers={"X-API-Key": key or ""}, timeout=ANSWER_S
            )
        except httpx.TransportError as e:
            reason = str(e)
        else:
            if got.is_success:
                return msgspec.json.decode(got.content, type=ReplicaAdmission)
            reason = _detail(got)
            if got.status_code not in (502, 503):
                refusal = WrongReplica if got.status_code in (400, 404) else JoinRefused
                raise refusal(f"{server} refuses this replica: {reason}")
        if time.monotonic() > until:
            raise ConnectionError(f"{server} does not answer ({reason})")
        if not is_told:
            is_told = True
            tell(f"waiting for {server} ({reason})")
        time.sleep(ASK_AGAIN_S)


def _detail(got: httpx.Response) -> str:
    try:
        return str(got.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {got.status_code}"


def engine_config(server: str, joined: ReplicaAdmission, folder: Path, state: str, given: JsonMapping) -> str:
    """Returns what the engine finds in its environment."""
    host = urlsplit(server).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    ticket = ReplicaTicket(
        replica_id=joined.replica_id, base_model=joined.base_model, signature=joined.signature, key_id=joined.key_id
    )
    config = {
        "address": f"tcp://{host}:{joined.port}",
        "model": str(folder),
        "state": state,
        "role": "sampler",
        "server_key": joined.server_key,
        "ticket": ticket,
        **joined.settings,
        **given,
    }
    return msgspec.json.encode(msgspec.convert(msgspec.to_builtins(config), WorkerConfig)).decode()
