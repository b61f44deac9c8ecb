"""The states of a resources server's sessions, limited in number and age."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from palestra.gym.errors import UnknownSession

log = logging.getLogger(__name__)

MAX_SESSIONS = 100_000
IDLE_S = 7200.0  # twice the longest rollout
# verified sessions that stay, in case a request is repeated: peers do so within a minute
RETIRED, RETIRED_S = 1_000, 120.0


class SessionStates:
    """States by session id. `release` is called with each state that is dropped."""

    def __init__(
        self,
        release: Callable[[Any], None],
        *,
        limit: int = MAX_SESSIONS,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._release = release
        self._limit, self._idle_s, self._clock = limit, idle_s, clock
        # In both the least recently used comes first; the second value is the time of last use.
        self._live: OrderedDict[str, tuple[Any, float]] = OrderedDict()
        self._retired: OrderedDict[str, tuple[Any, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live) + len(self._retired)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._live or session_id in self._retired

    def get(self, session_id: str) -> Any:
        for kept in (self._live, self._retired):
            if session_id in kept:
                state = kept.pop(session_id)[0]
                kept[session_id] = (state, self._clock())
                return state
        raise UnknownSession(
            f"there is no session {session_id}: it was never seeded here, was not used for {self._idle_s:g} "
            "s, or this server was restarted. Play the rollout again"
        )

    def put(self, session_id: str, state: object) -> None:
        old = self._live.pop(session_id, None) or self._retired.pop(session_id, None)
        if old is not None and old[0] is not state:
            self._release(old[0])
        self._live[session_id] = (state, self._clock())
        self._sweep()

    def retire(self, session_id: str) -> None:
        """Marks a judged session, which is dropped first."""
        if session_id in self._live:
            self._retired[session_id] = self._live.pop(session_id)
            self._sweep()

    def drop(self, session_id: str) -> bool:
        old = self._live.pop(session_id, None) or self._retired.pop(session_id, None)
        if old is not None:
            self._release(old[0])
        return old is not None

    def clear(self) -> None:
        for session_id in [*self._live, *self._retired]:
            self.drop(session_id)

    def _sweep(self) -> None:
        now, idle_s = self._clock(), self._idle_s
        for kept, limit, age_s in ((self._retired, RETIRED, min(RETIRED_S, idle_s)), (self._live, self._limit, idle_s)):
            before = now - age_s
            while kept:
                session_id, (_, used_at) = next(iter(kept.items()))
                if used_at >= before and len(kept) <= limit:
                    break
                if used_at >= before and kept is self._live:
                    log.warning(
                        "more than max_sessions = %d sessions at once; the least recently used one is dropped", limit
                    )
                self.drop(session_id)


class Session:
    """The session of one caller, during one call."""

    __slots__ = ("_states", "id", "rollout_id")

    def __init__(self, session_id: str, states: SessionStates, rollout_id: str | None = None) -> None:
        self.id = session_id
        self.rollout_id = rollout_id
        self._states = states

    @property
    def state(self) -> Any:
        """The state of the session. Raises UnknownSession."""
        return self._states.get(self.id)

    @state.setter
    def state(self, value: object) -> None:
        self._states.put(self.id, value)

    @property
    def is_known(self) -> bool:
        return self.id in self._states
