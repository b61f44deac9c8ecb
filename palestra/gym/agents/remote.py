"""The remote agent: a service of the user plays, and the gym has the tools and the verdict.

The service has one route, `POST {agent_base_url}/v1/responses`. A function call that it leaves unanswered is run here,
and its result is in the next request's input; calls that it answered itself stay as they are.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from msgspec import Meta

from palestra.chat.responses_output import message_item, response_body, text_part
from palestra.gym.agents.simple import play
from palestra.gym.errors import BadReply, GymConfigError, GymError
from palestra.gym.records import ServerInstance
from palestra.gym.servers.agents import Reply, Rollout, WorldAgentServer, WorldAgentSettings
from palestra.gym.servers.base import Peers
from palestra.gym.servers.responses import checked_response, filled_row, unanswered_calls
from palestra.gym.wire import encoded
from palestra.net.http_client import CallFailed, ConnectionClosed, HttpClient, HttpReply, NoConnection
from palestra.types.gym import FAILURE_CLASS, FAILURE_TERMINAL, NO_PERSIST
from palestra.types.gym_failures import FailureClass, RowFailure
from palestra.types.openai import ModelResponse, ResponsesParams
from palestra.util.json_types import JsonObject

log = logging.getLogger(__name__)

TRIES, WAIT_S = 3, 0.5  # if there is no connection, or it breaks
OWN_FIELDS = ("reward", "response", "error", FAILURE_CLASS, FAILURE_TERMINAL, NO_PERSIST)
"""Fields that a row may have from an earlier rollout: they must not be taken for this one's."""
SHOWN = 500
NOTHING = response_body(
    {"parallel_tool_calls": False},
    response_id=FailureClass.REMOTE_AGENT_ERROR,
    created_at=0.0,
    model="remote_agent",
    status="failed",
    output=[message_item("msg_0", [text_part("")])],
)
"""The response of a rollout that failed."""


class RemoteError(RuntimeError):
    """The service gave no usable answer; it may the next time."""


class RemoteAnswerInvalid(RemoteError):
    """The service answered something other than a Responses object, and would do so again."""


class RemoteAgentSettings(WorldAgentSettings, frozen=True, kw_only=True):
    """Settings of `remote_agent`."""

    agent_base_url: str
    """Address of the service that plays, with `POST /v1/responses`."""
    rollout_timeout_s: float = 86_400.0
    """Time limit of one `/run`, including the waiting for its turn."""
    concurrency: Annotated[int, Meta(ge=1)] = 32
    """Maximum number of rollouts at the service at once; more wait for their turn."""
    remote_responses_timeout_secs: float = 1800.0
    """Time limit of one answer of the service."""
    run_timeout_secs: float = 2100.0
    """Time limit from the beginning of the rollout: waiting for its turn does not count."""
    max_steps: int | None = None
    """Maximum number of calls of the service in one rollout. None: no limit."""


S = TypeVar("S", bound=RemoteAgentSettings)


class RemoteAgent(WorldAgentServer[S]):
    """Derive from `RemoteAgent[MySettings]` for further settings."""

    plain_settings = RemoteAgentSettings

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        self._url = f"{_checked_url(self.settings.agent_base_url)}/v1/responses"
        self._turns = asyncio.Semaphore(self.settings.concurrency)
        self._client = HttpClient(timeout_s=self.settings.remote_responses_timeout_secs, connect_s=None)

    async def close(self) -> None:
        await self._client.close()

    async def run(self, row: JsonObject, rollout: Rollout) -> JsonObject:
        """Always returns a row: an error is in it, for the failures file."""
        clean = {name: value for name, value in row.items() if name not in OWN_FIELDS}
        limit_s = self.settings.run_timeout_secs
        async with self._turns:
            limit = asyncio.timeout(limit_s)
            try:
                async with limit:
                    return await super().run(clean, rollout)
            except Exception as error:  # boundary: every failure becomes a row
                if isinstance(error, TimeoutError) and limit.expired():
                    error = RemoteError(f"the rollout took longer than run_timeout_secs = {limit_s:g}")
                log.warning("%s: a rollout failed: %s", self.name, str(error)[:SHOWN])
                return _failed_row(clean, error)

    async def respond(self, params: ResponsesParams, rollout: Rollout) -> Reply:
        talk = _Talk(self, rollout)
        max_steps = self.settings.max_steps
        response = await play(params, talk.call_model, talk.use_tool, max_steps=max_steps, calls_of=unanswered_calls)
        return Reply(response=response, cookies=dict(talk.resources_cookies))

    async def ask_service(self, body: ResponsesParams, cookies: dict[str, str]) -> HttpReply:
        """Calls the service. Raises RemoteError."""
        problem: Exception | None = None
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(WAIT_S)
            try:
                return await self._client.post(self._url, encoded(body), cookies=cookies)
            except (NoConnection, ConnectionClosed) as error:
                problem = error
            except TimeoutError:
                setting = f"remote_responses_timeout_secs = {self.settings.remote_responses_timeout_secs:g}"
                raise RemoteError(f"{self._url} did not answer within {setting}") from None
            except CallFailed as error:
                raise RemoteError(f"{self._url}: {error}") from error
        raise RemoteError(f"no connection to {self._url} in {TRIES} tries ({problem}). Is the service running?")


class _Talk:
    """The cookies of one rollout: those of the service are sent to no other server."""

    __slots__ = ("_agent", "_service_cookies", "resources_cookies")

    def __init__(self, agent: RemoteAgent[Any], rollout: Rollout) -> None:
        self._agent = agent
        self._service_cookies: dict[str, str] = {}
        self.resources_cookies = rollout.cookies

    async def call_model(self, body: ResponsesParams) -> ModelResponse:
        reply = await self._agent.ask_service(body, self._service_cookies)
        self._service_cookies |= reply.cookies
        shown = reply.body[:SHOWN].decode(errors="replace")
        if not 200 <= reply.status < 300:
            raise RemoteError(f"the service answered {reply.status}: {shown}")
        try:
            return checked_response(reply.json(), "the service")
        except (BadReply, ValueError):
            raise RemoteAnswerInvalid(f"the service returned no Responses object: {shown}") from None

    async def use_tool(self, name: str, arguments: object) -> str:
        resources = self._agent.settings.resources_server.name
        answer = await self._agent.peers.post(resources, f"/{name}", arguments, cookies=self.resources_cookies)
        self.resources_cookies = answer.cookies
        return answer.raw().decode(errors="replace")


def _failed_row(row: JsonObject, error: Exception) -> JsonObject:
    failure = error.failure if isinstance(error, GymError) else None
    if failure is None:
        is_final = isinstance(error, RemoteAnswerInvalid)
        failure = RowFailure(kind=FailureClass.REMOTE_AGENT_ERROR, reason=str(error), is_final=is_final)
    failed_row = {"reward": 0.0, "response": NOTHING, "error": f"{type(error).__name__}: {failure.reason[:SHOWN]}"}
    return filled_row(row) | failed_row | failure.fields()


def _checked_url(url: str) -> str:
    plain = url.strip().rstrip("/")
    parts = urlsplit(plain)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise GymConfigError(f"agent_base_url must be an absolute http:// or https:// URL, found {url!r}")
    if "@" in parts.netloc:  # a password would be visible in every log
        raise GymConfigError("agent_base_url must not contain a user or a password")
    if "?" in plain or "#" in plain:
        raise GymConfigError(f"agent_base_url must end before '?' and '#', found {url!r}")
    return plain
