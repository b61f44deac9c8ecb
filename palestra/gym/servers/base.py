"""What every server of a gym is: a name, settings, and answers to calls.

Owns: the one interface that fronts (HTTP, in process) and kinds (model, agent, resources) share, the answer to
`/aggregate_metrics`. Never touches: sockets, the figures (`palestra.gym.metrics`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from palestra.gym.errors import BadCall
from palestra.gym.records import ServerInstance, ServerKind
from palestra.gym.sessions import SessionSigner
from palestra.gym.wire import Cookies, GymRequest, GymResponse
from palestra.types.gym import ROLLOUT_INDEX, TASK_INDEX
from palestra.util.json_types import JsonMapping, JsonObject


class Peers(Protocol):
    """How a server reaches the others, by instance name: within this process, or over HTTP.

    `palestra.gym.peers` has the real one.
    """

    @property
    def settings(self) -> JsonMapping:
        """Settings of the whole gym."""
        ...

    def signer(self, name: str, purpose: str) -> SessionSigner:
        """With the gym's secret."""
        ...

    async def post(
        self, name: str, path: str, body: object, *, cookies: Cookies | None = None, timeout_s: float | None = None
    ) -> GymResponse:
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

    async def answer(self, call: GymRequest) -> GymResponse:
        """To a POST. Exceptions become a 500 in the front, in NeMo Gym's words."""
        raise NotImplementedError

    def routes(self) -> dict[str, JsonObject]:
        """JSON Schema of the body by path, for `/openapi.json`."""
        return {}

    async def look(self, path: str) -> GymResponse | None:
        """To a GET; None: there is nothing. `/` and the health routes are the front's."""
        return None


INDICES = (TASK_INDEX, ROLLOUT_INDEX)
FIELD = "verify_responses"


def aggregated(
    call: GymRequest,
    compute: Callable[[list[list[JsonMapping]]], JsonObject] | None = None,
    pick: Callable[[JsonObject], JsonObject] | None = None,
) -> GymResponse:
    """Raises BadCall."""
    from palestra.gym.metrics import aggregate

    rollouts = call.body.get(FIELD) if isinstance(call.body, dict) else None
    if not isinstance(rollouts, list):
        raise BadCall(422, [_problem("missing", [], "Field required", rollouts)])
    for number, one in enumerate(rollouts):
        if not isinstance(one, dict) or any(type(one.get(index, 0)) is not int for index in INDICES):
            words = f"Input should be a rollout: an object whose {' and '.join(INDICES)} are whole numbers"
            raise BadCall(422, [_problem("dict_type", [number], words, one)])
    return GymResponse(body=aggregate(rollouts, compute, pick))


def _problem(kind: str, where: list[int], words: str, given: object) -> JsonObject:
    return {"type": kind, "loc": ["body", FIELD, *where], "msg": words, "input": given}
