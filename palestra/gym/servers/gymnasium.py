"""Resources servers in Gymnasium's style: reset and step instead of tools and a verdict.

For example:

    class Guess(GymnasiumServer):
        async def reset(self, session: Session, secret: int) -> str:
            session.state = secret
            return "Guess a number."

        async def step(self, session: Session, response: dict[str, Any]) -> Step:
            is_right = output_text(response).strip() == str(session.state)
            return Step(reward=float(is_right), terminated=is_right, observation=None if is_right else "No.")
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from msgspec import Struct, field

from palestra.gym.errors import BadCall
from palestra.gym.records import STEP_ID, ServerInstance
from palestra.gym.servers.base import Peers
from palestra.gym.servers.handlers import Handler
from palestra.gym.servers.resources import ResourcesServer, Route, S
from palestra.gym.servers.states import Session, SessionStates
from palestra.gym.wire import GymRequest, GymResponse
from palestra.util.json_types import JsonObject

SUPPORTS = {"supports_explicit_close": True, "supports_step_idempotency": True}


class Start(Struct, frozen=True, kw_only=True):
    """What `reset` returns: the first observation for the model."""

    observation: str | None = None
    info: JsonObject = field(default_factory=dict)

    @classmethod
    def from_result(cls, result: Start | str | None) -> Start:
        return result if isinstance(result, Start) else cls(observation=result)


class Step(Struct, frozen=True, kw_only=True):
    """What `step` returns: an observation, a reward, and whether the rollout has ended."""

    observation: str | None = None
    """Becomes a user message."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: JsonObject = field(default_factory=dict)
    """`tool_outputs`: `[{call_id, output}]` answers function calls."""

    def fields(self) -> JsonObject:
        if not math.isfinite(self.reward):
            raise ValueError(f"a reward must be a finite number, found {self.reward}")
        return {name: getattr(self, name) for name in self.__struct_fields__}


class GymnasiumServer(ResourcesServer[S]):
    """Base class of a world that moves by `reset` and `step`."""

    _reset: ClassVar[Handler]
    _step: ClassVar[Handler]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls._reset, cls._step = Handler(cls.reset), Handler(cls.step)

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        limit, idle_s = self.settings.max_sessions, self.settings.session_idle_s
        # The last step of a session by its id: if the answer was lost, it is repeated, and the world moves only once.
        self._answered = SessionStates(lambda _: None, limit=limit, idle_s=idle_s)

    async def reset(self, *_: Any, **__: Any) -> Start | str | None:
        """Begins a rollout. Its parameters are fields of the row."""

    async def step(self, *_: Any, **__: Any) -> Step:
        """Called after each turn of the model. Its parameters are fields of the row, and this turn's response."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def table(self) -> dict[str, Route]:
        return {
            "/reset": self._began,
            "/step": self._stepped,
            "/close": self._ended,
            "/close_session": self._ended,
            "/aggregate_metrics": self._aggregated,
        }

    async def _began(self, call: GymRequest) -> GymResponse:
        self._answered.drop(call.session_id)
        start = Start.from_result(await self._reset.run(self, self.session(call), call.body))
        return GymResponse(body={"observation": start.observation, "info": SUPPORTS | start.info})

    async def _stepped(self, call: GymRequest) -> GymResponse:
        step_id = call.body.get(STEP_ID) if isinstance(call.body, dict) else None
        if step_id is not None and call.session_id in self._answered:
            last_id, answered = self._answered.get(call.session_id)
            if last_id == step_id:
                return GymResponse(body=answered)
        step = await self._step.run(self, self.session(call), call.body)
        if not isinstance(step, Step):
            raise TypeError(f"step must return a Step, found {type(step).__name__}")
        answered = step.fields()
        if step.terminated or step.truncated:
            self.states.retire(call.session_id)
        if step_id is not None:
            self._answered.put(call.session_id, (step_id, answered))
        return GymResponse(body=answered)

    async def _ended(self, call: GymRequest) -> GymResponse:
        self._answered.drop(call.session_id)
        return await self._closed(call)

    async def call_tool(self, session: Session, name: str, arguments: object) -> object:
        """Refuses the call: in this kind of world a call is part of a step."""
        raise BadCall(404, "Not Found")
