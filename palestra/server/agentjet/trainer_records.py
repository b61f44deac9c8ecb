"""The record of each owner's engine, written to disk before it is used."""

from __future__ import annotations

import time

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection

from palestra.server.agentjet.trainer_process import ProcessMark
from palestra.store import Store
from palestra.store.queries.keys import create_key, revoke_key
from palestra.store.queries.settings import put_setting, settings_under
from palestra.store.records import Rights
from palestra.types.tinkerscript import EngineStatus
from palestra.util.json_types import JsonObject

SETTING = "engine:"


class TrainerRecord(Struct, frozen=True, kw_only=True):
    config: JsonObject | None = None
    """The config for `palestra train`, made from AgentJet's."""
    run: str = ""
    """The engine's present or last run."""
    asked_name: str | None = None
    """The run's name in the config."""
    is_running: bool = False
    """Whether it runs, or did when the server ended."""
    process: ProcessMark | None = None
    key_id: int | None = None
    """Id of the key that the training process has."""
    announced: EngineStatus | None = None
    """The status that a trainer has reported."""
    detail: str = ""
    """Why it is offline."""
    set_aside: list[str] = []
    """Runs of engines that ended: they do not count for the status until their trainer is heard of again."""
    done: list[str] = []
    """Runs that were trained to their last step."""

    def without(self, run: str) -> TrainerRecord:
        """Returns the record with this run set aside."""
        return self if not run or run in self.set_aside else replace(self, set_aside=[*self.set_aside, run])

    def ended(self, detail: str, *, is_done: bool = False) -> TrainerRecord:
        done = [*self.done, self.run] if is_done else self.done
        return replace(self.without(self.run), is_running=False, process=None, key_id=None, detail=detail, done=done)


class TrainerRecords:
    def __init__(self, store: Store):
        self._store = store
        self._records: dict[str, TrainerRecord] = {}

    async def load(self) -> dict[str, TrainerRecord]:
        """Returns the records by owner."""
        saved = await self._store.read(lambda c: settings_under(c, SETTING))
        for name, text in saved.items():
            self._records[name.removeprefix(SETTING)] = msgspec.json.decode(text, type=TrainerRecord)
        return dict(self._records)

    def of(self, owner: str) -> TrainerRecord:
        return self._records.get(owner) or TrainerRecord()

    async def save(self, owner: str, record: TrainerRecord) -> None:
        await self._store.write(lambda c: self._write(c, owner, record))
        self._records[owner] = record

    async def save_with_key(self, owner: str, record: TrainerRecord) -> str:
        """Saves the record and returns a new key for its process, with the rights of a trainer."""
        now = time.time()
        name = f"engine {record.run} {time.time_ns()}"  # two owners may give their runs the same name

        def write(c: Connection) -> tuple[TrainerRecord, str]:
            new = create_key(c, name=name, owner=owner, rights=Rights.TRAINER, now=now)
            keyed = replace(record, key_id=new.key.key_id)
            self._write(c, owner, keyed)
            return keyed, new.text

        self._records[owner], key = await self._store.write(write)
        return key

    def _write(self, c: Connection, owner: str, record: TrainerRecord) -> None:
        """Writes the record, and revokes a key that the new record does not have any more."""
        put_setting(c, SETTING + owner, msgspec.json.encode(record).decode())
        old = self.of(owner).key_id
        if old is not None and old != record.key_id:
            revoke_key(c, old, now=time.time())
