"""OpenEnv over WebSockets: an instance for each connection, which ends with the connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from palestra.environments.platform.api.openenv.rpc import SERVER_ERROR, OpenEnvRpc
from palestra.environments.platform.api.openenv.sessions import OpenEnvSession, OpenEnvSessions
from palestra.environments.platform.api.openenv.wire import (
    ClientMistake,
    ErrorCode,
    SocketFrame,
    action_of,
    error_frame,
    frame,
    frame_of,
    reset_of,
)
from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import InstanceGone, InstanceOver, LimitReached

log = logging.getLogger(__name__)

CLOSE = "close"
NOTHING_TO_SAY = b'{"jsonrpc":"2.0","id":null,"result":{}}'


class OpenEnvSockets:
    def __init__(self, pool: InstancePool, sessions: OpenEnvSessions, rpc: OpenEnvRpc) -> None:
        self._pool, self._sessions, self._rpc = pool, sessions, rpc

    async def play(self, app: TaskApp, team: str, session_id: str | None, socket: WebSocket) -> None:
        """Serves `/ws`. With a `session_id`, in a session that was opened over HTTP and outlives the connection."""
        with contextlib.suppress(WebSocketDisconnect):  # raised when sending to a client that is gone
            try:
                session = await self._session(app, team, session_id)
            except LimitReached as e:
                more = {"active_sessions": e.count, "max_sessions": e.limit}
                await socket.send_text(error_frame(ErrorCode.CAPACITY, str(e), **more))
            except ClientMistake as e:
                await socket.send_text(error_frame(e.code, str(e)))
            except Exception as e:  # boundary: sent to the client before the connection ends
                log.exception("an instance of %s could not be made", app.key)
                await socket.send_text(error_frame(ErrorCode.FACTORY, f"the instance could not be made: {e}"))
            else:
                await self._played(session, session_id is None, socket)
            await _close(socket)

    async def talk(self, app: TaskApp, team: str, socket: WebSocket) -> None:
        """Serves `/mcp`: one JSON-RPC message in each frame."""
        with contextlib.suppress(WebSocketDisconnect):
            try:
                session = await self._sessions.open(app, team)
            except LimitReached as e:
                data = {"active_sessions": e.count, "max_sessions": e.limit}
                error = {"code": SERVER_ERROR, "message": str(e), "data": data}
                await socket.send_text(msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": error}).decode())
            else:
                try:
                    with self._pool.hold(session.instance_id):
                        async for text in _texts(socket):
                            if answer := await self._rpc.sent(session, _bytes(text)):
                                await socket.send_text(answer.decode())
                finally:
                    self._sessions.close(session)
            await _close(socket)

    async def _session(self, app: TaskApp, team: str, session_id: str | None) -> OpenEnvSession:
        if session_id is None:
            return await self._sessions.open(app, team)
        found = self._sessions.find(session_id, app, team)
        if found is None:
            raise ClientMistake(
                ErrorCode.SESSION, f"Unknown session_id: {session_id[:64]!r}; openenv/session/create makes one"
            )
        if found.is_attached:
            raise ClientMistake(ErrorCode.SESSION, "another WebSocket already plays in this session")
        return found

    async def _played(self, session: OpenEnvSession, is_own: bool, socket: WebSocket) -> None:
        session.is_attached = True
        try:
            with self._pool.hold(session.instance_id):
                async for text in _texts(socket):
                    answer = await self._answer_text(session, text)
                    if answer is CLOSE:
                        return
                    await socket.send_text(answer)
        except (InstanceGone, InstanceOver) as e:
            await socket.send_text(error_frame(ErrorCode.SESSION, str(e)))
        finally:
            session.is_attached = False
            if is_own or session.is_closing:
                self._sessions.close(session)

    async def _answer_text(self, session: OpenEnvSession, text: str | bytes) -> str:
        """Raises InstanceGone, InstanceOver: there is nothing left to play on."""
        try:
            return await self._answer(session, frame_of(text))
        except ClientMistake as e:
            return error_frame(e.code, str(e))
        except (InstanceGone, InstanceOver, asyncio.CancelledError):
            raise
        except Exception:  # boundary: an error of one step; the connection continues
            log.exception("a step in %s failed unexpectedly", session.app.key)
            return error_frame(
                ErrorCode.EXECUTION, "the step failed unexpectedly and changed nothing; see the platform's log"
            )

    async def _answer(self, session: OpenEnvSession, request: SocketFrame) -> str:
        match request.type:
            case "step":
                return frame("observation", session.step(action_of(request.data)))
            case "reset":
                return frame("observation", await session.reset(reset_of(request.data)))
            case "state":
                return frame("state", session.state())
            case "mcp":
                answer = await self._rpc.sent(session, msgspec.json.encode(request.data))
                return frame("mcp", msgspec.Raw(answer or NOTHING_TO_SAY))
            case "close":
                return CLOSE
            case other:
                known = "reset, step, state, mcp, close"
                raise ClientMistake(ErrorCode.UNKNOWN_TYPE, f"Unknown message type: {other[:64]!r}; there are {known}")


async def _texts(socket: WebSocket) -> AsyncIterator[str | bytes]:
    while (message := await socket.receive())["type"] == "websocket.receive":
        yield message["text"] if message.get("text") is not None else message["bytes"]


async def _close(socket: WebSocket) -> None:
    with contextlib.suppress(RuntimeError):  # the server has already closed it, after a frame that was too long
        await socket.close()


def _bytes(text: str | bytes) -> bytes:
    return text.encode(errors="surrogatepass") if isinstance(text, str) else text
