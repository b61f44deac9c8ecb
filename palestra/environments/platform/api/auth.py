"""Authentication: teams by their keys, the runner's token, host names of this server.

There are three entrances: the control plane (`/v1`) needs a team's key; an instance's tools (`/i/{id}/mcp`) need its
id, which cannot be guessed; its runner (`/i/{id}/api/v1/env`), where the state can be read and written, is open only
to the team that made it. So an agent that gets the address of the tools cannot look behind them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from palestra.environments.platform.pool_records import InstanceRecord
from palestra.util.json_types import JsonPayload

LOCAL_TEAM = "local"


class PlatformRefusal(Exception):
    """A refusal; `detail` is what Fleet's SDK reads."""

    def __init__(self, status: int, detail: str | JsonPayload) -> None:
        super().__init__(str(detail))
        self.status, self.detail = status, detail


class PlatformAuth:
    def __init__(self, keys: Iterable[str] = (), *, secret: bytes, is_loopback: bool = True) -> None:
        """`keys`: those of teams. Without any, on a loopback address, each key is a team of its own."""
        self._teams = {team_of(key) for key in keys}
        self._secret, self._is_loopback = secret, is_loopback
        if not self._teams and not is_loopback:
            raise ValueError("a platform that listens beyond loopback needs a key")

    def team(self, headers: Headers) -> str:
        key = _key_of(headers)
        if not self._teams:
            return team_of(key) if key else LOCAL_TEAM
        if not key:
            raise PlatformRefusal(401, "a key is needed: Authorization: Bearer KEY (the SDK: FLEET_API_KEY)")
        if (team := team_of(key)) not in self._teams:
            raise PlatformRefusal(401, "this key is not valid")
        return team

    def runner_token(self, team: str) -> str:
        return hmac.new(self._secret, team.encode(), hashlib.sha256).hexdigest()

    def login(self, instance_id: str) -> str:
        """Returns `name:password` for an address: it gives access to this instance's runner, and names it if the path
        does not."""
        answer = hmac.new(self._secret, f"instance {instance_id}".encode(), hashlib.sha256).hexdigest()
        return f"{instance_id}:{answer}"

    def check_runner(self, headers: Headers, record: InstanceRecord) -> None:
        """Accepts the token that a team gets at the control plane, the instance's own login, or the team's key."""
        token = headers.get("x-runner-token")
        if token is not None and hmac.compare_digest(token.encode(), self.runner_token(record.team).encode()):
            return
        if hmac.compare_digest(login_of(headers).encode(), self.login(record.id).encode()):
            return
        if _key_of(headers) and self.team(headers) == record.team:
            return
        raise PlatformRefusal(
            403, "the runner of an instance needs its team's X-Runner-Token (GET /v1/runner-auth/token)"
        )

    def check_origin(self, headers: Headers) -> None:
        """Refuses requests that a page in a user's browser makes under another host name."""
        host = headers.get("host") or ""
        if self._is_loopback and not _is_local(host):
            raise PlatformRefusal(403, f"this platform answers to localhost only, not to {host[:100]!r}")
        origin = headers.get("origin")
        if origin is not None and origin.partition("//")[2] != host:
            raise PlatformRefusal(403, f"requests from pages of {origin[:100]!r} are not accepted")


def login_of(headers: Headers) -> str:
    """Returns the login that clients send if an address contains one; empty: none, or an invalid one."""
    scheme, _, coded = (headers.get("authorization") or "").partition(" ")
    try:
        return base64.b64decode(coded).decode("ascii") if scheme.lower() == "basic" else ""
    except (binascii.Error, ValueError):
        return ""


def team_of(key: str) -> str:
    return f"team-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _key_of(headers: Headers) -> str:
    scheme, _, token = (headers.get("authorization") or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


@lru_cache(maxsize=1024)
def _is_local(address: str) -> bool:
    """Whether the host name of a request is local, with or without a port."""
    try:
        host = urlsplit(f"//{address}").hostname or ""
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
