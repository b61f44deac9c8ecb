"""The meaning of the calls around a session."""

from __future__ import annotations

import secrets
import time

from palestra.server.core.errors import Refusal, not_found
from palestra.server.core.owners.callers import Caller
from palestra.server.core.sessions import TinkerSession, TinkerSessions
from palestra.server.core.teardown import Teardown
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.tinker import schemas as s
from palestra.store import Store
from palestra.store.queries import sessions as session_rows
from palestra.store.records import SessionRow as SessionRow
from palestra.types.engine import ModelCard


class SessionService:
    def __init__(self, store: Store, served: ServedModels, sessions: TinkerSessions, teardown: Teardown):
        self._store, self._served, self._sessions, self._teardown = store, served, sessions, teardown

    def capabilities(self) -> s.CapabilitiesResponse:
        models = [supported_model(name, worker.card) for name, worker in self._served.by_name.items()]
        return s.CapabilitiesResponse(supported_models=models)

    async def create_session(self, caller: Caller, request: s.CreateSessionRequest) -> str:
        session_id, now = secrets.token_hex(16), time.time()
        row = SessionRow(
            session_id=session_id,
            owner=caller.owner,
            created_at=now,
            last_heartbeat_at=now,
            tags=list(request.tags),
            user_metadata=dict(request.user_metadata or {}),
            sdk_version=request.sdk_version,
            project_id=request.project_id,
            display_name=request.display_name,
        )
        await self._store.write(lambda c: session_rows.insert_session(c, row))
        self._sessions.active[session_id] = TinkerSession(session_id, caller.owner)
        return session_id

    async def heartbeat(self, caller: Caller, session_id: str) -> None:
        session = self._sessions.find(session_id, caller.owner)
        if session is None:
            row = await self._store.read(lambda c: session_rows.get_session(c, session_id))
            if row is None or row.owner != caller.owner:
                raise not_found("session", session_id)
            raise Refusal(410, f"session {session_id} has ended ({row.status})")
        session.touch()

    async def finish_session(self, caller: Caller, session_id: str, request: s.FinishSessionRequest) -> None:
        """Finishes a session. The first end counts; repeating it is no error."""
        session = self._sessions.find(session_id, caller.owner)
        if session is None:
            row = await self._store.read(lambda c: session_rows.get_session(c, session_id))
            if row is None or row.owner != caller.owner:
                raise not_found("session", session_id)
            return
        await self._teardown.end_session(
            session,
            "the session was finished by its client",
            lambda: self._store.write(
                lambda c: session_rows.finish_session(c, session_id, reason=request.reason.type, detail=request.detail)
            ),
        )


def supported_model(name: str, card: ModelCard | None) -> s.SupportedModel:
    """Returns the description of a base model for clients; `card` is None until its worker has loaded it."""
    if card is None:
        return s.SupportedModel(model_name=name)
    return s.SupportedModel(
        model_name=name,
        max_context_length=card.max_positions,
        hidden_size=card.hidden_size or None,
        architecture=card.architecture,
    )
