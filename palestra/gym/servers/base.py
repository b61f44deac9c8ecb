"""The base of every server of a gym: a name, settings, and answers to calls."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeAlias

from palestra.gym.call_counts import CallCounts
from palestra.gym.errors import BadCall, FieldProblem
from palestra.gym.records import ServerInstance, ServerKind
from palestra.gym.sessions import SessionSigner
from palestra.gym.wire import Cookies, GymRequest, GymResponse
from palestra.types.gym import ROLLOUT_INDEX, TASK_INDEX, ComputeMetrics, PickKeyMetrics
from palestra.util.json_types import JsonMapping, JsonPayload


class Peers(Protocol):
    """How a server reaches the others, by instance name: within this process, or over HTTP.

    The implementation is in `palestra.gym.peers`.
    """

    @property
    def settings(self) -> JsonMapping:
        """Settings that the whole gym shares."""
        ...

    def signer(self, name: str, purpose: str) -> SessionSigner:
        """Signer of tokens, with the gym's secret."""
        ...

    async def post(
        self, name: str, path: str, body: object, *, cookies: Cookies | None = None, timeout_s: float | None = None
    ) -> GymResponse:
        """Sends a POST and returns the answer, whatever its status. Raises UnreachableServer after bounded retries; a
        request is sent again only if there was no connection, or if its path may be repeated."""
        ...


RouteSchemas: TypeAlias = dict[str, JsonPayload]
"""JSON Schemas of bodies by path."""


class GymServer:
    """One server instance. Kinds derive from it; implementations derive from the kinds."""

    kind: ClassVar[ServerKind]

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        self.instance = instance
        self.peers = peers
        self.calls = CallCounts()

    @property
    def name(self) -> str:
        return self.instance.name

    @property
    def cookie_name(self) -> str:
        """Name of the session cookie as in NeMo Gym: the class and the instance."""
        return f"{type(self).__name__}___{self.name}"

    async def open(self) -> None:
        """Called before the first request. If it raises, the server does not become healthy."""

    async def close(self) -> None:
        """Called after the last request."""

    async def answer(self, call: GymRequest) -> GymResponse:
        """Answers a POST. Exceptions become a 500 with NeMo Gym's text."""
        raise NotImplementedError

    def routes(self) -> RouteSchemas:
        """JSON Schema of the body by path, for `/openapi.json`."""
        return {}

    async def look(self, path: str) -> GymResponse | None:
        """Answers a GET; None if there is no such route. `/` and the health routes are answered elsewhere."""
        return None


INDICES = (TASK_INDEX, ROLLOUT_INDEX)
FIELD = "verify_responses"


def aggregated(
    call: GymRequest,
    compute: ComputeMetrics | None = None,
    pick: PickKeyMetrics | None = None,
) -> GymResponse:
    """Answers `/aggregate_metrics`. Raises BadCall."""
    from palestra.gym.metrics import aggregate

    rollouts = call.body.get(FIELD) if isinstance(call.body, dict) else None
    if not isinstance(rollouts, list):
        raise BadCall(422, [_problem("missing", [], "Field required", rollouts)])
    for number, one in enumerate(rollouts):
        if not isinstance(one, dict) or any(type(one.get(index, 0)) is not int for index in INDICES):
            message = f"Input should be a rollout: an object whose {' and '.join(INDICES)} are whole numbers"
            raise BadCall(422, [_problem("dict_type", [number], message, one)])
    return GymResponse(body=aggregate(rollouts, compute, pick))


def _problem(kind: str, where: list[int], message: str, given: object) -> FieldProblem:
    return {"type": kind, "loc": ["body", FIELD, *where], "msg": message, "input": given}
