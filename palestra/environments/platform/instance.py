"""One running copy of an app: its state, and tool calls on it.

Everything is in the database, so that a copy of the database is a copy of the instance.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta

import msgspec

from palestra.environments.platform.app import SeedDatabase, SeedSize, TaskApp
from palestra.environments.platform.changes import Change, changes, tables_of
from palestra.environments.platform.errors import PlatformError, ToolError
from palestra.environments.platform.failing_tools import FAILING, check_available
from palestra.environments.platform.scripted_user import HiddenFacts, hidden_facts
from palestra.environments.platform.seeds import CLOCK, PAGE_BYTES, seed_of
from palestra.environments.platform.task_templates import TemplateEvent
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import PlatformTool, ToolOutput
from palestra.net.mcp import ToolResult
from palestra.util.json_types import JsonPayload

TICK = timedelta(minutes=1)
"""How far the world's clock moves with each call that writes."""
MAX_PAGES = (64 << 20) // PAGE_BYTES  # a hundred times a large world
SQLITE_PAGES = 2**32 - 2  # SQLite's maximum
FULL = {"error": "full", "message": "this world holds nothing more", "hint": "the task cannot be gone on with"}
MAX_CALL = 200_000  # characters: ten of the longest texts that a tool accepts
MAX_NAME = 100  # characters of an unknown tool's name that are repeated to its caller


class Instance:
    """A living world of an app: an SQLite database in memory, and the tools that act on it."""

    def __init__(
        self, seed: SeedDatabase, data: bytes | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        self.seed, self.app = seed, seed.app
        self.variables: Mapping[str, str] = {**seed.variables, **(variables or {})}
        self._lock = threading.RLock()
        """Calls to one instance run one after another; those to other instances concurrently."""
        self._connection: sqlite3.Connection | None = None
        self._open(seed.data if data is None else data)

    @classmethod
    def create(cls, app: TaskApp, seed: int = 0, size: SeedSize = SeedSize.SMALL) -> Instance:
        return cls(seed_of(app, seed, size))

    def _open(self, data: bytes) -> None:
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        connection.deserialize(data)
        self._connection = connection

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise PlatformError("this instance is closed")
        return self._connection

    # Tools

    def call(self, name: str, arguments: object) -> ToolResult:
        """Always returns a result: an error of the model is one, too. A call that fails has changed nothing. All calls
        are logged, except those to an instance that is full."""
        with self._lock:
            connection = self.connection
            if connection.execute("PRAGMA page_count").fetchone()[0] > MAX_PAGES:
                return ToolResult(msgspec.json.encode(FULL).decode(), is_error=True)
            connection.execute("BEGIN")
            noted = "null"
            try:
                noted = _noted(name, arguments)
                tool = self._tool(name)
                if FAILING in self.variables:
                    turn = connection.execute("SELECT count(*) FROM _events").fetchone()[0]
                    check_available(self.variables, turn, tool.name)
                outcome, error = self._run(connection, tool, tool.checked(arguments)), ""
                connection.execute("COMMIT")
            except ToolError as e:
                connection.execute("ROLLBACK")
                outcome, error = {"error": e.code, "message": e.message, **({"hint": e.hint} if e.hint else {})}, e.code
            except BaseException:  # nothing of a failed call may stay
                connection.execute("ROLLBACK")
                raise
            connection.execute("INSERT INTO _events (call, error) VALUES (?, ?)", (noted, error))
        return ToolResult(msgspec.json.encode(outcome).decode(), bool(error))

    def _tool(self, name: str) -> PlatformTool:
        found = self.app.tool(name)
        if found is None:
            raise ToolError(
                "unknown_tool",
                f"there is no tool {name[:MAX_NAME]!r}",
                f"use {', '.join(t.name for t in self.app.tools)}",
            )
        return found

    def _run(self, connection: sqlite3.Connection, tool: PlatformTool, arguments: JsonPayload) -> ToolOutput:
        now = datetime.fromisoformat(self.now)
        if tool.writes:
            now += TICK
            connection.execute("UPDATE _facts SET value = ? WHERE name = ?", (now.isoformat(), CLOCK))
        try:
            return tool.run(ToolContext(connection, self.variables, now.isoformat()), **arguments)
        except OverflowError:
            raise ToolError("bad_arguments", "a number is too large", tool.usage) from None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Sets up a world by hand: all of it or nothing, without calls in between."""
        with self._lock:
            connection = self.connection
            # tools get an error when they come to the last page
            connection.execute(f"PRAGMA max_page_count = {MAX_PAGES + 1}")
            connection.execute("BEGIN")
            try:
                yield connection
                if connection.in_transaction:  # SQLite rolls back by itself if it had to stop a statement
                    connection.execute("COMMIT")
            except BaseException:  # nothing of a failed call may stay
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            finally:
                connection.execute(f"PRAGMA max_page_count = {SQLITE_PAGES}")

    # State

    @property
    def now(self) -> str:
        """The time in this world."""
        return self.connection.execute("SELECT value FROM _facts WHERE name = ?", (CLOCK,)).fetchone()[0]

    def changes(self) -> list[Change]:
        """Returns the net changes since the seed database."""
        with self._lock:
            return changes(self.connection, self.app.volatile)

    def events(self) -> list[TemplateEvent]:
        with self._lock:
            rows = self.connection.execute("SELECT turn, call, error FROM _events ORDER BY turn").fetchall()
        called = ((turn, msgspec.json.decode(call) or ["", None], error) for turn, call, error in rows)
        return [TemplateEvent(turn, tool, arguments, error) for turn, (tool, arguments), error in called]

    def hidden_facts(self) -> HiddenFacts:
        """Returns what only the user on the line knows, and what both said; empty where there is no user."""
        with self._lock:
            return hidden_facts(self.connection, self.variables)

    def state_hash(self) -> str:
        """Returns a hash of all rows, without volatile columns, and of the clock."""
        digest = hashlib.blake2b(digest_size=16)
        with self._lock:
            for table in tables_of(self.connection):
                kept = [c for c in table.columns if c not in self.app.volatile.get(table.name, ())]
                columns, order = (", ".join(f'"{c}"' for c in names) for names in (kept, table.key))
                rows = self.connection.execute(f'SELECT {columns} FROM "{table.name}" ORDER BY {order}').fetchall()
                digest.update(msgspec.json.encode([table.name, kept, rows]))
            digest.update(self.now.encode())
        return digest.hexdigest()

    def snapshot(self) -> bytes:
        with self._lock:
            return self.connection.serialize()

    def restore(self, data: bytes) -> None:
        """Restores a snapshot of this instance, or of one with the same seed."""
        with self._lock:
            self.close()
            self._open(data)

    def reset(self) -> None:
        self.restore(self.seed.data)

    def fork(self) -> Instance:
        return Instance(self.seed, self.snapshot(), self.variables)


def _noted(name: str, arguments: object) -> str:
    """Returns what is logged of a call; its size is limited, because every call is logged."""
    text = as_text([name, arguments])
    if len(text) > MAX_CALL:
        raise ToolError(
            "bad_arguments", f"a call has at most {MAX_CALL} characters, this has {len(text)}", "shorten it"
        )
    return text


def as_text(value: object) -> str:
    r"""Returns JSON. A lone surrogate, which a model may write as \ud83d, cannot be stored anywhere."""
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, ValueError, TypeError) as e:
        raise ToolError("bad_arguments", f"this cannot be written as JSON: {e}", "write whole characters") from None
