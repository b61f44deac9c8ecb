"""The meaning of Tinker's REST calls: training runs, checkpoints, sessions, keys.

Every lookup is by owner: what belongs to another owner does not exist, unless it is published and the call asks for it.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Literal

from palestra.server.core.checkpoints.files import CheckpointFiles, key_of
from palestra.server.core.errors import Refusal, not_found
from palestra.server.core.owners.callers import Caller
from palestra.server.core.paths import TinkerPath, check_name, check_run_id, parse_kind
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.wire_errors import WireError, shown
from palestra.server.tinker import schemas_rest as r
from palestra.server.tinker.downloads import VALID_S, DownloadSigner, DownloadTicket, files_in, version_of
from palestra.server.tinker.rest_objects import checkpoint_of, run_of, strings, summary_of, time_of
from palestra.store import Store, records
from palestra.store.queries import checkpoints as checkpoint_rows
from palestra.store.queries import models as model_rows
from palestra.store.queries import samplers as sampler_rows
from palestra.store.queries import sessions as session_rows
from palestra.store.queries.keys import revoke_key
from palestra.store.queries.session_search import search_sessions

Scope = Literal["owned", "accessible"]

_SESSION = re.compile("[A-Za-z0-9_-]{1,64}")
_STATUSES = {
    "active": records.SessionStatus.ACTIVE,
    "cancelled": records.SessionStatus.EXPIRED,
    "client_finished": records.SessionStatus.FINISHED,
}  # "failed": no session of ours has this status


def path_from(run_id: str, kind: str, name: str) -> TinkerPath:
    """Builds a path from the parts of a URL."""
    return TinkerPath(check_run_id(run_id), parse_kind(kind), check_name(name))


class RestService:
    def __init__(self, store: Store, training: TrainingRequests, checkpoints: CheckpointFiles, secret: str):
        self._store, self._training, self._checkpoints = store, training, checkpoints
        self._signer = DownloadSigner(secret)

    # Training runs

    async def training_runs(
        self, caller: Caller, scope: Scope, project_id: str | None, limit: int, offset: int
    ) -> r.TrainingRunsResponse:
        now = time.time()
        page = await self._store.read(
            lambda c: model_rows.list_models(
                c,
                owner=caller.owner,
                public_at=now if scope == "accessible" else None,
                project_id=project_id,
                limit=limit,
                offset=offset,
            )
        )
        runs = await self._runs(caller, page.items)
        return r.TrainingRunsResponse(
            training_runs=runs, cursor=r.PageCursor(offset=offset, limit=limit, total_count=page.total)
        )

    async def training_run(self, caller: Caller, run_id: str, scope: Scope) -> r.TrainingRun:
        row, now = await self._run(run_id), time.time()
        is_theirs = row is not None and row.owner == caller.owner
        if row is None or not (
            is_theirs
            or (scope == "accessible" and await self._store.read(lambda c: model_rows.is_public(c, run_id, now)))
        ):
            raise not_found("training run", run_id)
        return (await self._runs(caller, [row]))[0]

    async def run_checkpoints(self, caller: Caller, run_id: str) -> r.CheckpointsResponse:
        """Returns all of them: the SDK does not request pages here."""
        row, now = await self._run(run_id), time.time()
        if row is None or row.owner != caller.owner:
            raise not_found("training run", run_id)
        page = await self._store.read(
            lambda c: checkpoint_rows.list_checkpoints(c, owner=caller.owner, model_id=run_id, alive_at=now)
        )
        return r.CheckpointsResponse(
            checkpoints=[checkpoint_of(row) for row in page.items],
            cursor=r.PageCursor(offset=0, limit=page.total, total_count=page.total),
        )

    async def _run(self, run_id: str) -> records.ModelRow | None:
        check_run_id(run_id)
        return await self._store.read(lambda c: model_rows.get_model(c, run_id))

    async def _runs(self, caller: Caller, rows: list[records.ModelRow]) -> list[r.TrainingRun]:
        ids, now, kinds = [row.model_id for row in rows], time.time(), records.CheckpointKind
        last, last_sampler = [
            await self._store.read(
                lambda c, kind=kind: checkpoint_rows.last_checkpoints(
                    c, ids, kind, visible_to=caller.owner, alive_at=now
                )
            )
            for kind in (kinds.WEIGHTS, kinds.SAMPLER)
        ]
        return [
            run_of(row, self._last_request_at(row), last.get(row.model_id), last_sampler.get(row.model_id))
            for row in rows
        ]

    def _last_request_at(self, row: records.ModelRow) -> float:
        """Returns the time of the last request; the database has it some seconds late."""
        model = self._training.models.get(row.model_id)
        return max(row.last_request_at, model.last_request_at if model else 0.0)

    # Checkpoints

    async def checkpoints(self, caller: Caller, limit: int, offset: int) -> r.CheckpointsResponse:
        now = time.time()
        page = await self._store.read(
            lambda c: checkpoint_rows.list_checkpoints(c, owner=caller.owner, alive_at=now, limit=limit, offset=offset)
        )
        return r.CheckpointsResponse(
            checkpoints=[checkpoint_of(row) for row in page.items],
            cursor=r.PageCursor(offset=offset, limit=limit, total_count=page.total),
        )

    async def delete(self, caller: Caller, path: TinkerPath) -> None:
        """Deletes a path at once; its files are deleted later."""
        await self._checkpoints.delete(path, caller.owner)

    async def publish(self, caller: Caller, path: TinkerPath, *, public: bool) -> None:
        """Publishing twice is no error, because the SDK would repeat a 409 for minutes."""
        await self._checkpoints.find(path, caller.owner, own=True)
        key = key_of(path)
        if not await self._store.write(lambda c: checkpoint_rows.publish_checkpoint(c, key, public=public)):
            raise not_found("checkpoint", str(path))

    async def set_ttl(self, caller: Caller, path: TinkerPath, ttl_s: int | None) -> None:
        await self._checkpoints.find(path, caller.owner, own=True)
        key, now = key_of(path), time.time()
        if not await self._store.write(lambda c: checkpoint_rows.set_ttl(c, key, ttl_s, now=now)):
            raise not_found("checkpoint", str(path))

    # Files

    async def file_urls(self, caller: Caller, path: TinkerPath, base_url: str) -> r.ExternalWeightsUrlsResponse:
        if path.kind is not records.CheckpointKind.EXTERNAL:
            raise Refusal(
                400, f"{path} cannot be downloaded; only external_weights can, which save_weights_external makes"
            )
        found = await self._checkpoints.open(path, caller.owner)
        expires = int(min(time.time() + VALID_S, found.expires_at or float("inf")))
        version = version_of(found.folder)
        files = await asyncio.to_thread(files_in, found.folder)
        urls = {file: self._signer.url(base_url, DownloadTicket(path, version, file, expires)) for file in files}
        return r.ExternalWeightsUrlsResponse(urls=urls, expires=time_of(expires))

    async def file(self, ticket: DownloadTicket, signature: str) -> Path:
        """Returns a file to any caller that has the URL. The signature is checked first: without it no caller learns
        what exists."""
        self._signer.check(ticket, signature, time.time())
        row = await self._store.read(lambda c: checkpoint_rows.get_checkpoint(c, key_of(ticket.path)))
        if row is not None:
            found = await self._checkpoints.open(ticket.path, row.owner)
            files = await asyncio.to_thread(files_in, found.folder)
            if version_of(found.folder) == ticket.version and ticket.file in files:
                return files[ticket.file]
        raise not_found("file any more", ticket.file)

    # Sessions

    async def sessions(self, caller: Caller, limit: int, offset: int) -> r.SessionsResponse:
        page = await self._store.read(
            lambda c: session_rows.list_sessions(c, owner=caller.owner, limit=limit, offset=offset)
        )
        return r.SessionsResponse(sessions=[row.session_id for row in page.items])

    async def session(self, caller: Caller, session_id: str) -> r.SessionResponse:
        row = await self.own_session(caller, session_id)
        models = await self._store.read(lambda c: model_rows.models_of_session(c, session_id))
        samplers = await self._store.read(lambda c: sampler_rows.samplers_of_session(c, session_id))
        return r.SessionResponse(
            training_run_ids=[model.model_id for model in models],
            sampler_ids=[sampler.sampler_id for sampler in samplers],
            user_metadata=strings(row.user_metadata),
            display_name=row.display_name,
        )

    async def search(self, caller: Caller, request: r.SearchRequest) -> r.SearchResponse:
        statuses = None
        if request.statuses is not None:
            statuses = [
                records.StatusFilter(status=_STATUSES[s.type], finish_reasons=list(s.reasons) if s.reasons else None)
                for s in request.statuses
                if s.type in _STATUSES
            ]
            if not statuses:
                return r.SearchResponse(sessions=[])
        owners = [caller.owner]
        if request.owner.type == "user" and caller.owner not in (request.owner.owner_urns or ()):
            owners = []
        cursor = None
        if request.cursor is not None:
            cursor = records.SearchCursor(
                created_at=request.cursor.last_created_at.timestamp(), session_id=request.cursor.last_session_id
            )
        search = records.SessionSearch(
            session_id=request.session_id,
            display_name=request.display_name,
            owners=owners,
            project_ids=request.project_ids,
            user_metadata=request.user_metadata or {},
            statuses=statuses,
            limit=request.limit,
            cursor=cursor,
        )
        page = await self._store.read(lambda c: search_sessions(c, search))
        following = None
        if page.next_cursor is not None:
            following = r.SearchCursorObject(
                last_created_at=time_of(page.next_cursor.created_at), last_session_id=page.next_cursor.session_id
            )
        return r.SearchResponse(sessions=[summary_of(found) for found in page.sessions], next_cursor=following)

    async def set_project(self, caller: Caller, session_id: str, project_id: str) -> None:
        await self.own_session(caller, session_id)
        await self._store.write(lambda c: session_rows.set_session_project(c, session_id, project_id))

    async def own_session(self, caller: Caller, session_id: str) -> records.SessionRow:
        if not _SESSION.fullmatch(session_id):
            raise WireError(f"{shown(session_id)} is not the id of a session")
        row = await self._store.read(lambda c: session_rows.get_session(c, session_id))
        if row is None or row.owner != caller.owner:
            raise not_found("session", session_id)
        return row

    # Keys

    def key(self, caller: Caller) -> r.KeyResponse:
        key = caller.key
        details = r.KeyDetails(
            org_details=r.OrgDetails(name="Palestra"), user_details=r.UserDetails(email=caller.owner)
        )
        if key is None:
            return r.KeyResponse(key_id=0, name="local", note="this server accepts any key", details=details)
        return r.KeyResponse(key_id=key.key_id, name=key.name, note=f"right: {key.rights}", details=details)

    async def revoke(self, caller: Caller) -> None:
        key, now = caller.key, time.time()
        if key is None:
            raise Refusal(400, "there is nothing to revoke: this server accepts any key")
        await self._store.write(lambda c: revoke_key(c, key.key_id, now=now))
