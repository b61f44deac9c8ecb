"""Responses by their ids, as they were sent, and the conversations that led to them, from their traces."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection

from palestra.server.core.errors import ApiError
from palestra.server.core.owners.callers import Caller
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.json_text import dumps
from palestra.store import Store
from palestra.store.queries import responses as rows
from palestra.store.queries import traces
from palestra.store.queries.responses import StoredResponse
from palestra.store.queries.traces import TurnKey
from palestra.types.openai import ModelResponse
from palestra.types.rollouts import Message

NO_PREVIOUS = "previous_response_id", "previous_response_not_found"
"""The field, and OpenAI's code."""


class StoredResponses:
    def __init__(self, store: Store):
        self._store = store

    async def keep(self, turn: TurnKey, body: ModelResponse) -> None:
        """Stores a response, which is on disk when this returns."""
        response = StoredResponse(response_id=body.get("id", ""), turn=turn, body=dumps(body))
        await self._store.write(lambda conn: rows.add_response(conn, response))

    async def body(self, caller: Caller, response_id: str) -> bytes:
        return (await self._store.read(lambda conn: _find(conn, caller, response_id))).body

    async def delete(self, caller: Caller, response_id: str) -> None:
        """Deletes a response; its trace stays."""
        await self._store.read(lambda conn: _find(conn, caller, response_id))
        await self._store.write(lambda conn: rows.delete_response(conn, response_id))

    async def history(self, caller: Caller, response_id: str) -> list[Message]:
        """Returns the messages up to and including a response, without its instructions, which hold for one request."""

        def read(conn: Connection) -> list[Message]:
            found = _find(conn, caller, response_id, 400)
            messages = traces.messages_of(conn, found.turn)
            return _without(json.loads(found.body).get("instructions"), messages)

        return await self._store.read(read)


def _find(conn: Connection, caller: Caller, response_id: str, status: int = 404) -> StoredResponse:
    origin = None if caller.attempt is None else caller.attempt.origin
    found = rows.find_response(conn, response_id, caller.owner, origin)
    if found is None:
        detail = (
            f"there is no response {shown(response_id)}: it was never stored (store: false), was deleted, or its trace "
            "was; send the whole conversation as input"
        )
        name, code = ("response_id", "not_found") if status == 404 else NO_PREVIOUS
        raise ApiError(status, detail, param=name, code=code)
    return found


def _without(instructions: Any, messages: list[Message]) -> list[Message]:
    if not instructions or not messages or messages[0]["role"] != "system":
        return messages
    rest = str(messages[0]["content"]).removeprefix(str(instructions)).removeprefix("\n\n")
    return [{"role": "system", "content": rest}, *messages[1:]] if rest else messages[1:]
