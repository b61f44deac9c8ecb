"""Resources servers: a world with tools, and the verdict on a rollout.

For example:

    class Counter(ResourcesServer):
        async def seed_session(self, session: Session, initial_count: int = 0) -> None:
            session.state = initial_count

        @tool
        async def add(self, session: Session, count: int) -> dict[str, int]:
            '''Add to the counter.'''
            session.state += count
            return {"count": session.state}

        async def verify(self, session: Session, expected_count: int) -> bool:
            return session.state == expected_count
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from msgspec import Meta, Struct, field

from palestra.gym.errors import BadCall, GymConfigError, JudgeError, PeerFailed
from palestra.gym.records import ServerInstance, ServerKind
from palestra.gym.servers.base import GymServer, Peers, RouteSchemas, aggregated
from palestra.gym.servers.handlers import Handler, ToolSpec
from palestra.gym.servers.mcp import PURPOSE, McpEndpoint
from palestra.gym.servers.responses import check_given
from palestra.gym.servers.settings import settings_of, settings_type
from palestra.gym.servers.states import IDLE_S, MAX_SESSIONS, Session, SessionStates
from palestra.gym.wire import GymRequest, GymResponse, encoded
from palestra.types.gym import PARAMS
from palestra.types.gym_failures import FailureClass, RowFailure
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

F = TypeVar("F", bound=Callable[..., Any])
Route = Callable[[GymRequest], Awaitable[GymResponse]]

RESERVED = frozenset({"seed_session", "verify", "aggregate_metrics", "close_session", "mcp"})
"""Routes of servers: no tool has such a name, and no model may call them."""
TOOL_MARK = "_is_gym_tool"
TEXT = "text/plain; charset=utf-8"


def tool(method: F) -> F:
    """Makes a method of a ResourcesServer a tool. Models read its docstring; its parameters, except `session`, are the
    arguments."""
    setattr(method, TOOL_MARK, True)
    return method


class ReverifyMode(StrEnum):
    """Whether `verify` can grade a stored rollout again."""

    STATELESS = "stateless"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


class ResourcesSettings(Struct, frozen=True, kw_only=True):
    """Settings of every resources server. Derive from it for further ones: `class
    Mine(ResourcesServer[MySettings])`."""

    max_sessions: Annotated[int, Meta(ge=1)] = MAX_SESSIONS
    """Sessions whose state is kept in memory; beyond it, the least recently used ones are dropped."""
    session_idle_s: float = IDLE_S
    """Seconds without use after which a session's state is dropped."""
    expose_tools_over_mcp: bool = False
    """Also offer the tools at `/mcp`, for agents that speak MCP."""


S = TypeVar("S", bound=ResourcesSettings)


class ResourcesServer(GymServer, Generic[S]):
    """Base class of a gym's world: tools that models call, and the verdict."""

    kind = ServerKind.RESOURCES
    reverify_mode: ClassVar[ReverifyMode] = ReverifyMode.UNKNOWN
    tools: ClassVar[dict[str, Handler]] = {}
    _seed: ClassVar[Handler]
    _verify: ClassVar[Handler]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        marked = {name: Handler(getattr(cls, name)) for name in dir(cls) if hasattr(getattr(cls, name), TOOL_MARK)}
        if bad := sorted(RESERVED & marked.keys()):
            raise GymConfigError(f"{cls.__name__}: {bad[0]} is a route of the server and cannot be a tool")
        cls.tools = marked
        cls._seed, cls._verify = Handler(cls.seed_session), Handler(cls.verify)

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        self.settings: S = settings_of(instance, settings_type(type(self), ResourcesSettings))
        limit, idle_s = self.settings.max_sessions, self.settings.session_idle_s
        self.states = SessionStates(self.release, limit=limit, idle_s=idle_s)
        self._mcp = self._mcp_endpoint() if self.settings.expose_tools_over_mcp else None
        self._table = self.table()

    # To override in a server

    async def seed_session(self, *_: Any, **__: Any) -> JsonMapping | None:
        """Begins a rollout. Its parameters are fields of the row; its return value goes to the agent."""

    async def verify(self, *_: Any, **__: Any) -> Any:
        """The reward of a rollout: a number, a truth, a Verdict, or a mapping with `reward`."""
        raise NotImplementedError(f"{type(self).__name__} has no verify")

    def compute_metrics(self, tasks: list[list[JsonMapping]]) -> JsonPayload:
        """Further metrics, computed from all rollouts by task."""
        return {}

    def key_metrics(self, metrics: JsonObject) -> JsonPayload:
        """The most important metrics."""
        return {name: value for name, value in metrics.items() if name.startswith("mean/")}

    def release(self, state: Any) -> None:
        """Called when the state of a session is dropped: close what it holds."""

    def tool_specs(self) -> list[ToolSpec]:
        return [ToolSpec(one.name, one.description, one.schema) for one in self.tools.values()]

    async def call_tool(self, session: Session, name: str, arguments: object) -> object:
        """Calls a tool. Override it together with `tool_specs` if the tools are not methods. Raises BadCall."""
        found = self.tools.get(name)
        if found is None:
            raise BadCall(404, "Not Found")
        return await found.run(self, session, arguments, is_strict=True)

    # The rest

    def _mcp_endpoint(self) -> McpEndpoint:
        signer = self.peers.signer(self.cookie_name, PURPOSE)
        return McpEndpoint(self.name, signer, self.states, self.tool_specs, self.call_tool)

    def table(self) -> dict[str, Route]:
        routes: dict[str, Route] = {
            "/seed_session": self._seeded,
            "/verify": self._verified,
            "/aggregate_metrics": self._aggregated,
            "/close_session": self._closed,
        }
        return routes | {"/mcp": self._mcp.answer} if self._mcp else routes

    async def answer(self, call: GymRequest) -> GymResponse:
        route = self._table.get(call.path)
        return await (route(call) if route is not None else self._called(call))

    async def look(self, path: str) -> GymResponse | None:
        return GymResponse(body=self.reverify_mode.value) if path == "/reverify_mode" else None

    def routes(self) -> RouteSchemas:
        own: RouteSchemas = {path: {"type": "object"} for path in self._table}
        return own | {f"/{one.name}": one.parameters for one in self.tool_specs()}

    async def close(self) -> None:
        self.states.clear()

    def session(self, call: GymRequest) -> Session:
        return Session(call.session_id, self.states, call.rollout_id)

    async def _seeded(self, call: GymRequest) -> GymResponse:
        session = self.session(call)
        found = await self._seed.run(self, session, call.body)
        seeded = dict(found or {})
        return GymResponse(body=seeded | self._mcp.invitation(session.id) if self._mcp else seeded)

    async def _called(self, call: GymRequest) -> GymResponse:
        """Returns the result as text, as a model reads it; a result that is not JSON is an error of this server."""
        result = await self.call_tool(self.session(call), call.path[1:], call.body)
        if isinstance(result, str):
            return GymResponse(body=result.encode(errors="replace"), content_type=TEXT)
        return GymResponse(body=encoded(result))

    async def _verified(self, call: GymRequest) -> GymResponse:
        row = call.body
        if isinstance(row, dict) and "response" in row:
            check_given(row["response"])
        try:
            seen = self._mcp.with_bare_names(row) if self._mcp else row
            verdict = Verdict.from_result(await self._verify.run(self, self.session(call), seen))
        except JudgeError as error:
            return GymResponse(body=unjudged(row, error))
        self.states.retire(call.session_id)
        return GymResponse(body=verified(row, [one.name for one in self._verify.fields], verdict))

    async def _aggregated(self, call: GymRequest) -> GymResponse:
        return aggregated(call, self.compute_metrics, self.key_metrics)

    async def _closed(self, call: GymRequest) -> GymResponse:
        """Closes a session. NeMo Gym 0.7 names it in the body; it is no error if it does not exist."""
        named = call.body.get("resources_session_id") if isinstance(call.body, dict) else None
        self.states.drop(named if isinstance(named, str) else call.session_id)
        return GymResponse(body={})

    async def ask_judge(self, name: str, body: object, path: str = "/v1/responses", timeout_s: float = 600) -> Any:
        """Asks a judge model. Any failure is a JudgeError, so that the rollout does not count as a wrong answer."""
        try:
            answer = await self.peers.post(name, path, body, timeout_s=timeout_s)
            if answer.is_ok:
                return answer.value()
        except Exception as error:  # boundary: whatever keeps a judge from answering is not a wrong answer
            raise JudgeError(f"{type(error).__name__}: {error}") from error
        raise JudgeError(str(PeerFailed(name, path, answer.status, answer.raw())))


REWARD, COMPONENTS = "reward", "reward_components"
JUDGE_WORDS = "_ng_failure_judge_error"
TOLERANCE = 1e-5  # NeMo RL's, between a reward and the sum of its components


class Verdict(Struct, frozen=True):
    """What `verify` returns about a rollout: a reward, and what else is to be kept."""

    reward: float
    extra: JsonMapping = field(default_factory=dict)
    """Further fields of the row; numbers and booleans are included in the metrics."""
    components: Mapping[str, float] | None = None
    """Several rewards by name, the same names for every task; `reward` is their sum."""

    @classmethod
    def of(cls, components: Mapping[str, float], **extra: object) -> Verdict:
        return cls(float(sum(components.values())), extra, components)

    @classmethod
    def from_result(cls, result: object) -> Verdict:
        """A verdict made from a Verdict, a number, a boolean, or a mapping with a `reward`."""
        if isinstance(result, Verdict):
            return result
        if isinstance(result, bool | int | float):
            return cls(float(result))
        if isinstance(result, Mapping) and isinstance(result.get(REWARD), bool | int | float):
            extra = {name: value for name, value in result.items() if name not in (REWARD, COMPONENTS)}
            return cls(float(result[REWARD]), extra, result.get(COMPONENTS))
        raise TypeError(
            f"verify must return a reward, a Verdict or a mapping with a reward, found {type(result).__name__}"
        )

    def fields(self) -> JsonPayload:
        """The verdict as fields of the row. Raises ValueError if a trainer could not use it."""
        if not math.isfinite(self.reward):
            raise ValueError(f"a reward must be a finite number, found {self.reward}")
        found = {**self.extra, REWARD: self.reward}
        if self.components is not None:
            total = math.fsum(self.components.values())
            if not math.isclose(total, self.reward, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                raise ValueError(f"the reward {self.reward} is not the sum of its components, {total}")
            found[COMPONENTS] = dict(self.components)
        return found


def verified(row: JsonMapping, names: list[str], verdict: Verdict) -> JsonPayload:
    """Returns the judged row: the fields that `verify` takes, and the verdict."""
    kept = {name: row[name] for name in (PARAMS, "response", *names) if name in row}
    return {**kept, **verdict.fields()}


def unjudged(row: JsonMapping, error: JudgeError) -> JsonPayload:
    """Returns the row of a rollout whose judge failed, so that it can be judged again."""
    failure = RowFailure.of(FailureClass.JUDGE_FAILED, str(error))
    return {**row, REWARD: 0.0, **failure.fields(), JUDGE_WORDS: str(error)}
