"""Usage of owners and runs: counted when a result arrives, before its client learns of it, and each once.

result → a line of the log, and memory → the database, every few seconds

After a kill the log has what the database lacks. A training result that arrives again after a restart, or at a server
that took over, is known by its number. Owns: counting, today's tokens. Never touches: limits (`quotas`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection

from palestra.server.core.telemetry.metrics import Metrics
from palestra.store import Store
from palestra.store.queries.settings import get_setting, put_setting
from palestra.store.queries.usage import (
    UsageGrouping,
    UsageTotal,
    add_usage,
    advance_usage,
    read_usage,
    tokens_of_day,
    usage_seqs,
)
from palestra.store.records import UsageCounts, UsageKey
from palestra.store.usage_log import UsageEntry, UsageLog
from palestra.types import SampleResult
from palestra.types.engine import PassResult, TrainOutcome

POSITION = "usage_log:"
"""Settings that say how much of each log is in the database: servers that take turns have one each."""


class UsageAccount:
    def __init__(self, store: Store, log: UsageLog, metrics: Metrics):
        self._store, self._log, self._metrics = store, log, metrics
        self._position = POSITION + log.name
        self._unwritten: dict[UsageKey, UsageCounts] = {}
        self._seqs: dict[str, int] = {}
        """The last request of each model that was counted."""
        self._unwritten_seqs: dict[str, int] = {}
        self._day, self._tokens = "", Counter[str]()
        """The tokens that each owner has used on this day."""
        self._writing = asyncio.Lock()  # otherwise a failed write could be behind a later one's position

    async def restore(self, seqs: Mapping[str, int]) -> None:
        """Counts what a killed server has not written. `seqs` are those of the models that are loaded."""
        self._seqs.update(seqs)
        self._day = day_of(time.time())
        self._tokens.update(await self._store.read(lambda c: tokens_of_day(c, self._day)))
        written = await self._store.read(lambda c: get_setting(c, self._position))
        entries = list(self._log.after(written))
        ended = {entry.model_id for entry in entries} - self._seqs.keys()
        self._seqs.update(await self._store.read(lambda c: usage_seqs(c, ended)))
        for entry in entries:
            if not self._is_counted(entry.model_id, entry.seq_id):
                self._take(entry)
        await self.flush()

    # Counting

    def sampled(self, owner: str, run: str, prompt_tokens: int, *, sampled_tokens: int, engine_s: float = 0.0) -> None:
        counts = UsageCounts(prompts=1, prompt_tokens=prompt_tokens, sampled_tokens=sampled_tokens, engine_s=engine_s)
        self._add(UsageEntry(UsageKey(day_of(time.time()), owner, run), counts))

    def trained(self, owner: str, model_id: str, seq_id: int, outcome: TrainOutcome, engine_s: float) -> None:
        """Counts a training request, unless it was counted before the server was restarted."""
        if self._is_counted(model_id, seq_id):
            return
        tokens = sum(one.shape[0] for one in outcome.outputs) if isinstance(outcome, PassResult) else 0
        counts = UsageCounts(trained_tokens=tokens, engine_s=engine_s)
        self._add(UsageEntry(UsageKey(day_of(time.time()), owner, model_id), counts, model_id, seq_id))

    def _is_counted(self, model_id: str, seq_id: int) -> bool:
        return bool(model_id) and seq_id <= self._seqs.get(model_id, -1)

    def _add(self, entry: UsageEntry) -> None:
        self._log.append(entry)
        self._take(entry)
        counts = entry.counts
        self._metrics.owner_used(
            entry.key.owner,
            prompt=counts.prompt_tokens,
            sampled=counts.sampled_tokens,
            trained=counts.trained_tokens,
        )

    def _take(self, entry: UsageEntry) -> None:
        self._unwritten.setdefault(entry.key, UsageCounts()).add(entry.counts)
        if entry.model_id:
            self._seqs[entry.model_id] = self._unwritten_seqs[entry.model_id] = entry.seq_id
        if entry.key.day > self._day:
            self._day, self._tokens = entry.key.day, Counter()
        if entry.key.day == self._day:
            self._tokens[entry.key.owner] += entry.counts.tokens

    def tokens_today(self, owner: str) -> int:
        return self._tokens[owner] if self._day == day_of(time.time()) else 0

    async def totals(
        self,
        by: tuple[UsageGrouping, ...],
        *,
        owner: str | None = None,
        since: str | None = None,
        until: str | None = None,
    ) -> list[UsageTotal]:
        """Returns the usage of all owners or one, added up, from one day to another."""
        await self.flush()
        return await self._store.read(lambda c: read_usage(c, by, owner=owner, since=since, until=until))

    # Writing

    async def flush(self) -> None:
        """Writes to the database what is not there yet. If it fails, it is tried again the next time."""
        await asyncio.shield(self._flush())  # whether a write was made must be known: nothing is counted twice

    async def _flush(self) -> None:
        async with self._writing:
            if not self._unwritten:
                return
            counts, self._unwritten = self._unwritten, {}
            seqs, self._unwritten_seqs = self._unwritten_seqs, {}
            position = self._log.position

            def write(c: Connection) -> None:
                add_usage(c, counts)
                advance_usage(c, seqs)
                put_setting(c, self._position, position)

            try:
                await self._store.write(write)
            except BaseException:
                for key, later in self._unwritten.items():
                    counts.setdefault(key, UsageCounts()).add(later)
                self._unwritten, self._unwritten_seqs = counts, seqs | self._unwritten_seqs
                raise
            self._log.forget(position)

    def close(self) -> None:
        self._log.close()


def tokens_in(result: SampleResult) -> int:
    return sum(len(sequence.tokens) for sequence in result.sequences)


def day_of(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()


def next_day(at: float) -> str:
    """Returns when the next day begins, by UTC."""
    return f"{datetime.fromtimestamp(at, UTC).date() + timedelta(days=1)}T00:00:00Z"
