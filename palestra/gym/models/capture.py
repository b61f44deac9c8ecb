"""Captures requests and answers of model servers by rollout: one file of exchanges, one of token ids."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

import orjson

from palestra.gym.errors import BadCall, PeerFailed, UnreachableServer
from palestra.gym.models.settings import CaptureSettings
from palestra.gym.records import ROLLOUT_NAME, ServerKind
from palestra.gym.wire import encoded
from palestra.types.anthropic import AnthropicMessage
from palestra.types.gym import ROUTED_EXPERTS, TOKEN_FIELDS
from palestra.types.openai import ChatCompletion, ModelResponse, ResponseItem
from palestra.util.json_types import JsonObject, JsonPayload

log = logging.getLogger(__name__)


CALLS, TOKENS = "capture", "tokens"
SCHEMA_VERSION = 1


WholeAnswer: TypeAlias = ModelResponse | ChatCompletion | AnthropicMessage
"""An answer in one of the three APIs."""


@dataclass(slots=True)
class CapturedExchange:
    """A call that is under way."""

    rollout_id: str
    dialect: str
    request: JsonPayload
    model_call_id: str = field(default_factory=lambda: uuid4().hex)
    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.perf_counter)


@dataclass(slots=True)
class CapturedRecords:
    """The content of a file."""

    lines: list[JsonObject]
    damaged: int
    """Number of lines that cannot be read."""
    is_incomplete: bool
    """Whether something could not be written."""


class CaptureFolder:
    """Files of one kind, `ROLLOUT.KIND.jsonl`; a file with a gap is marked by `ROLLOUT.KIND.incomplete`."""

    def __init__(self, root: Path, sort: str) -> None:
        self._root, self._sort = root, sort

    def append(self, rollout_id: str, line: JsonPayload) -> None:
        """Appends a line, which is on disk when this returns. Several processes may write to one rollout."""
        self._root.mkdir(parents=True, exist_ok=True)
        with self._path(rollout_id).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(encoded(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def mark_incomplete(self, rollout_id: str) -> None:
        self._path(rollout_id, "incomplete").touch()

    def read(self, rollout_id: str) -> CapturedRecords:
        path = self._path(rollout_id)
        kept = CapturedRecords([], 0, self._path(rollout_id, "incomplete").exists())
        for raw in path.read_bytes().splitlines() if path.exists() else ():
            try:
                line = orjson.loads(raw)
            except ValueError:
                line = None
            if isinstance(line, dict):
                kept.lines.append(line)
            elif raw.strip():
                kept.damaged += 1
        return kept

    def clear(self, rollout_ids: Iterable[str]) -> None:
        """Deletes files before rollouts begin: those of an earlier run may have had the same ids."""
        for one in rollout_ids:
            self._path(one).unlink(missing_ok=True)
            self._path(one, "incomplete").unlink(missing_ok=True)

    def _path(self, rollout_id: str, ending: str = "jsonl") -> Path:
        if ROLLOUT_NAME.fullmatch(rollout_id) is None:
            raise ValueError(
                f"{rollout_id!r} is not a rollout id, which has letters, digits, and . _ - after the first"
            )
        return self._root / f"{rollout_id}.{self._sort}.{ending}"


class Captures:
    """The captures of a model server. If the disk is full, the record of a call is lost, not its answer, and the gap is
    marked."""

    def __init__(self, server: str, calls: CaptureFolder | None, tokens: CaptureFolder | None) -> None:
        self._server, self._calls, self._tokens = server, calls, tokens

    @classmethod
    def of(cls, settings: CaptureSettings, server: str) -> Captures | None:
        calls, tokens = folders(settings)
        return None if calls is None and tokens is None else cls(server, calls, tokens)

    async def keep(self, exchange: CapturedExchange, status: int, response: WholeAnswer | None) -> None:
        problem = "upstream_error" if response is None else None
        await self._keep(exchange, status, problem, response)

    async def keep_failure(self, exchange: CapturedExchange, error: Exception) -> None:
        status = error.status if isinstance(error, PeerFailed | BadCall) else 500
        await self._keep(exchange, status, _category(error), None, response_raw=str(error))

    async def _keep(
        self, exchange: CapturedExchange, status: int, problem: str | None, response: WholeAnswer | None, **more: object
    ) -> None:
        if self._calls is None:
            return
        line = {
            "model_call_id": exchange.model_call_id,
            "dialect": exchange.dialect,
            "model_ref": {"type": str(ServerKind.MODEL), "name": self._server},
            "started_at": exchange.started_at,
            "completed_at": time.time(),
            "latency_ms": round((time.perf_counter() - exchange.began) * 1000, 2),
            "latency_ttft_ms": None,
            "status_code": status,
            "error_category": problem,
            "request": exchange.request,
            "response": response,
            **more,
        }
        await asyncio.to_thread(_written, self._calls, exchange.rollout_id, line)

    async def keep_tokens(
        self, exchange: CapturedExchange, response: WholeAnswer | None, items: list[ResponseItem] | None
    ) -> None:
        """Stores the token ids of a call that came with `/training-token-capture`."""
        if self._tokens is None or response is None or not items:
            return
        last = items[-1]
        if any(last.get(key) is None for key in TOKEN_FIELDS):
            if not _is_empty(items):  # a conversation that filled the context ends with nothing: no ids are missing
                log.warning("a call of rollout %s was answered without token ids", exchange.rollout_id)
                await asyncio.to_thread(self._tokens.mark_incomplete, exchange.rollout_id)
            return
        ids = {key: last[key] for key in TOKEN_FIELDS}
        if last.get(ROUTED_EXPERTS) is not None:
            ids[ROUTED_EXPERTS] = last[ROUTED_EXPERTS]
        line = {
            "schema_version": SCHEMA_VERSION,
            "rollout_id": exchange.rollout_id,
            "model_call_id": exchange.model_call_id,
            "model": response.get("model"),
            **ids,
            "output_items": [*items[:-1], {key: value for key, value in last.items() if key not in ids}],
            "token_item_index": len(items) - 1,
            "created_at": time.time(),
        }
        await asyncio.to_thread(_written, self._tokens, exchange.rollout_id, line)


def folders(settings: CaptureSettings) -> tuple[CaptureFolder | None, CaptureFolder | None]:
    """Returns the folders for exchanges and for token ids; None if the gym does not capture them."""
    calls = settings.model_call_capture_dir if settings.observability_enabled else None
    tokens = settings.tokens.dir if settings.tokens.enabled else None
    return (
        None if calls is None else CaptureFolder(Path(calls), CALLS),
        None if tokens is None else CaptureFolder(Path(tokens), TOKENS),
    )


def _written(folder: CaptureFolder, rollout_id: str, line: JsonPayload) -> None:
    try:
        folder.append(rollout_id, line)
    except OSError as e:
        log.error("a call of rollout %s could not be stored: %s", rollout_id, e)
        try:
            folder.mark_incomplete(rollout_id)
        except OSError as again:
            log.error("the note that the call is missing could not be stored either: %s", again)


def _is_empty(items: list[ResponseItem]) -> bool:
    return (
        len(items) == 1
        and items[0].get("type") == "message"
        and not any(part.get("text") for part in items[0].get("content") or ())
    )


def _category(error: Exception) -> str:
    if isinstance(error, UnreachableServer | TimeoutError):
        return "timeout" if "within" in str(error) else "connection"
    if not isinstance(error, PeerFailed | BadCall):
        return "exception"
    match error.status:
        case 408 | 504:
            return "timeout"
        case 429:
            return "rate_limit"
        case 401 | 403:
            return "auth"
        case 404:
            return "not_found"
        case status:
            return "client_error" if status < 500 else "upstream_error"
