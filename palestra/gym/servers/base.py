"""What every server of a gym is: a name, settings, and answers to calls.

Owns: the one interface that fronts (HTTP, in process) and kinds (model, agent, resources) share. Never touches:
sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from palestra.gym.records import ServerInstance, ServerKind
from palestra.gym.sessions import SessionSigner
from palestra.gym.wire import Answer, Call
from palestra.util.json_types import JsonMapping, JsonObject


class Peers(Protocol):
    """How a server reaches the others, by instance name: within this process, or over HTTP.

    `palestra.gym.peers` has the real one.
    """

    @property
    def settings(self) -> JsonMapping:
        """Of the whole gym."""
        ...

    def signer(self, name: str, purpose: str) -> SessionSigner:
        """With the gym's secret."""
        ...

    async def post(
        self,
        name: str,
        path: str,
        body: object,
        *,
        cookies: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Whatever status it has. Raises UnreachableServer after bounded retries; only what cannot have been
        begun (no connection) is sent again, unless the path is one that may be repeated."""
        ...


class GymServer:
    """One server instance. Kinds derive from it; implementations derive from the kinds."""

    kind: ClassVar[ServerKind]

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        self.instance = instance
        self.peers = peers

    @property
    def name(self) -> str:
        return self.instance.name

    @property
    def cookie_name(self) -> str:
        """NeMo Gym's: the class and the instance."""
        return f"{type(self).__name__}___{self.name}"

    async def open(self) -> None:
        """Before the first call. What it raises keeps the server from becoming healthy."""

    async def close(self) -> None:
        """After the last call."""

    async def answer(self, call: Call) -> Answer:
        """To a POST. Exceptions become a 500 in the front, in NeMo Gym's words."""
        raise NotImplementedError

    def routes(self) -> dict[str, JsonObject]:
        """JSON Schema of the body by path, for `/openapi.json`."""
        return {}

    async def look(self, path: str) -> Answer | None:
        """To a GET; None: there is nothing. `/` and the health routes are the front's."""
        return None
