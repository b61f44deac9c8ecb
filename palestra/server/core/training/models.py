"""A model as the server sees it: which request numbers have arrived, were sent to the worker, or were given up.

Owns: the order of one model's requests. Never touches: the journal, the worker's messages, time.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from palestra.server.core.futures import TrainFuture
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.store.journal.journal import Position
from palestra.types import LoraConfig

MAX_AHEAD = 10_000  # one call is some thousand chunks at most; a gap is settled number by number


@dataclass(slots=True, eq=False)
class TrackedModel:
    model_id: str
    session_id: str
    owner: str
    base_model: str
    lora: LoraConfig
    worker: WorkerSupervisor
    snapshot_seq: int = -1
    """Everything up to this number is in each of the worker's snapshots, in their copies if there are to be any, and
    may have been deleted from the journal."""
    covered_seq: int = -1
    """Everything up to this number is in each of the worker's snapshots. It may be ahead of `snapshot_seq` where
    snapshots are copied for other servers."""
    next_seq: int = 0
    """Every smaller number may be sent to the worker, or will never arrive."""
    sent_seq: int = -1
    """Everything up to this number was sent to the living worker."""
    futures: dict[int, TrainFuture] = field(default_factory=dict)
    early: dict[int, TrainFuture] = field(default_factory=dict)
    """Requests with numbers from `next_seq` on."""
    settled: set[int] = field(default_factory=set)
    settled_at: list[tuple[int, Position]] = field(default_factory=list)
    """Positions of the journal's records of settled numbers, with the highest of the numbers: held until a snapshot
    covers that one."""
    given_up: set[int] = field(default_factory=set)
    """Numbers that will not arrive, but could not be recorded in the journal yet."""
    missing: list[int] = field(default_factory=list)
    """Numbers of requests that were acknowledged and are missing in the journal."""
    settling: int = 0
    gap_timer: asyncio.TimerHandle | None = None
    last_request_at: float = field(default_factory=time.time)

    def add(self, future: TrainFuture) -> None:
        self.futures[future.seq_id] = future
        if future.seq_id >= self.next_seq:
            self.early[future.seq_id] = future

    def forget(self, future: TrainFuture) -> None:
        self.futures.pop(future.seq_id, None)
        self.early.pop(future.seq_id, None)

    def is_open(self, seq_id: int) -> bool:
        """Whether a request with this number may still arrive."""
        in_reach = self.next_seq <= seq_id < self.next_seq + MAX_AHEAD
        return in_reach and seq_id not in self.futures and seq_id not in self.settled

    def take_ready(self) -> list[TrainFuture]:
        """Returns the requests whose turn it is, in order; numbers that were given up are skipped."""
        ready: list[TrainFuture] = []
        while not self.settling:
            future = self.early.get(self.next_seq)
            if future is not None and future.durable is None:
                del self.early[self.next_seq]
                self.next_seq += 1
                ready.append(future)
            elif self.next_seq in self.settled:
                self.settled.discard(self.next_seq)
                self.next_seq += 1
            else:
                break
        return ready

    def is_last_missing(self, seq_id: int) -> bool:
        """Whether requests that have arrived wait for this number and no other. So does a chunked call for its first
        part."""
        border = max(self.early, default=-1)
        others = (n for n in range(self.next_seq, border) if n != seq_id)
        return seq_id < border and all(n in self.early or n in self.settled for n in others)

    @property
    def has_gap(self) -> bool:
        return bool(self.early) and not self.settling and self.next_seq not in self.early

    @property
    def sure_gap(self) -> list[int]:
        """Returns missing numbers that will not arrive. A chunked call sends its first part last, so a forward or
        backward pass may still fill a gap before other passes; nothing else arrives out of order."""
        missing = self.missing_before(max((n for n, f in self.early.items() if not f.kind.is_pass), default=-1))
        return sorted({n for n in self.given_up if n >= self.next_seq}.union(missing))

    def missing_before(self, border: int) -> list[int]:
        return [n for n in range(self.next_seq, border) if n not in self.early and n not in self.settled]

    def find_missing(self, last_seq: int) -> None:
        """Called after a restart: up to this number, everything was in the journal or given up there."""
        in_journal = {n for n, future in self.futures.items() if future.request_at is not None}
        self.missing = [n for n in range(self.next_seq, last_seq + 1) if n not in in_journal | self.settled]
        self.settled.update(self.missing)

    def why_lost(self, received_seq: int) -> str | None:
        """Returns why the model is lost, if a worker that has the requests up to this number cannot be sent all
        others."""
        if received_seq < self.snapshot_seq:
            return f"no snapshot of the model can be read, and the journal begins after request {self.snapshot_seq}"
        missing = [n for n in self.missing if n > received_seq]
        if missing:
            some = f"request {missing[0]}" if len(missing) == 1 else f"requests {missing[0]} to {missing[-1]}"
            return f"the journal was damaged and has lost {some}, which had been acknowledged"
        return None

    def stop_timer(self) -> None:
        if self.gap_timer is not None:
            self.gap_timer.cancel()
            self.gap_timer = None
