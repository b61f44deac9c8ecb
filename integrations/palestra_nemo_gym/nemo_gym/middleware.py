"""The middleware of every server: sessions in a signed cookie, errors as answers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from uuid import uuid4

from aiohttp import ClientResponseError
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemo_gym.json_types import JsonObject

log = logging.getLogger("nemo_gym")

SECRET_VARIABLE = "PALESTRA_GYM_SECRET"
LIFE_VARIABLE = "PALESTRA_GYM_LIFE"
LIFE = os.environ.get(LIFE_VARIABLE) or uuid4().hex
"""Identifies this process and its workers."""
BEGINNINGS = ("/", "/seed_session", "/reset", "/aggregate_metrics", "/reverify_mode")
CLASS, REASON, TERMINAL = "_ng_failure_class", "failure_reason", "_ng_failure_terminal"
"""A failure's fields. Its words are those of `palestra.types.gym_failures`, which this process may not have."""
WORDS = 2_000
GONE = "the state of this session was lost when the server restarted. Play the rollout again"


class _SessionIds:
    """Whoever has none gets one. It is set anew each time, so that every answer has the cookie.

    What such a server knows of a session is in its process. One that was killed and started again would go on with
    nothing, and judge a rollout it has not seen: instead, sessions of an earlier process are refused, and the rollout
    is played again."""

    def __init__(self, app: ASGIApp, has_state: bool) -> None:
        self._app = app
        self._has_state = has_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = scope.get("session")
        if session is None:
            await self._app(scope, receive, send)
            return
        is_gone = bool(session.get("session_id")) and session.get("life") != LIFE
        if is_gone and self._has_state and scope["path"] not in BEGINNINGS:
            session["session_id"] = session["session_id"]
            await JSONResponse({CLASS: "session_lost", REASON: GONE}, status_code=500)(scope, receive, send)
            return
        session.update(session_id=session.get("session_id") or str(uuid4()), life=LIFE)
        await self._app(scope, receive, send)


class _Errors:
    """An exception is an answer, in the words of NeMo Gym; but what another server said failed is passed on as it is,
    so that it is told once however many servers it comes through."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app = app
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def sent(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:  # of a server's own code: callers get an answer
            if scope["type"] != "http" or has_begun:
                raise
            log.exception("%s: %s %s failed", self._name, scope["method"], scope["path"])
            failure = _passed_on(error) if isinstance(error, ClientResponseError) else repr(error)
            is_final = isinstance(failure, dict) and failure.get(TERMINAL)
            await JSONResponse(failure, status_code=422 if is_final else 500)(scope, receive, send)


def _passed_on(error: ClientResponseError) -> JsonObject:
    """What a call of another server came to, in the fields of a row for the failures file."""
    content = getattr(error, "response_content", error.message)
    text = content.decode(errors="replace") if isinstance(content, bytes) else str(content)
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    if isinstance(found, dict) and found.get(CLASS):
        return found
    path, status = error.request_info.url.path, error.status
    body = {REASON: f"{path} answered {status}: {_error_text(found, text)[:WORDS]}", "status": status}
    is_model = "/v1/" in path
    is_refused = status in (400, 413, 422) if is_model else 400 <= status < 500 and status not in (408, 409, 425, 429)
    if path.endswith("/verify"):
        kind = "verifier_refused" if is_refused else "verifier_error"
    elif is_refused:
        kind = "row_refused"
    else:
        kind = "model_error" if is_model else "world_error"
    return {CLASS: kind, **body, **({TERMINAL: True} if is_refused else {})}


def _error_text(found: object, text: str) -> str:
    """Without the JSON around them, and without the body that FastAPI shows again."""
    detail = found.get("detail") if isinstance(found, dict) else found
    if isinstance(detail, list):
        detail = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in detail if "loc" in one)
    return detail if isinstance(detail, str) and detail else text


def add_sessions(app: FastAPI, name: str, has_state: bool = False) -> None:
    """The gym's secret signs the cookie: in NeMo Gym its name does, which everybody knows."""
    if any(one.cls is _SessionIds for one in app.user_middleware):
        return
    app.add_middleware(_SessionIds, has_state=has_state)  # the first added is the innermost
    app.add_middleware(SessionMiddleware, secret_key=cookie_key(name), session_cookie=name)


def cookie_key(name: str) -> str:
    return hashlib.sha256(f"cookie\0{name}\0{os.environ.get(SECRET_VARIABLE, '')}".encode()).hexdigest()


def add_exception_handling(app: FastAPI, name: str) -> None:
    """Innermost, so that an error's answer has the session's cookie too."""
    app.user_middleware.append(Middleware(_Errors, name=name))
