"""Verifiers that come with a task: untrusted Python source, run in a process of its own that can do nothing but
compute.

If an assertion of the verifier fails, the score is 0. A verifier that raises, hangs, is killed, or returns no number
from 0 to 1 says nothing about the policy: its outcome is unknown, never 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from palestra.sandbox.compute_only import process

log = logging.getLogger(__name__)

CHILD = "palestra.environments.platform.verifiers.runtime.child"
MAX_ANSWER = 4 * 1024 * 1024  # bytes; printed text is cut long before

_has_warned = False
_rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class VerifierLimits(msgspec.Struct, frozen=True):
    """Limits of a verifier's process."""

    wall_s: float = 30.0
    memory_bytes: int = 512 * 1024 * 1024


class VerifierExecution(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a verifier."""

    success: bool
    """Whether it came to a verdict: it returned a score, or one of its assertions failed."""
    result: float | None = None
    stdout: str = ""
    error: str = ""
    """The assertion that failed, or why there is no verdict."""

    @property
    def score(self) -> float | None:
        """The score; None if it is unknown."""
        if any(line.startswith("JUDGE ERROR:") for line in self.stdout.splitlines()):
            return None
        return self.result if self.success else None


class _Answer(msgspec.Struct):
    success: bool
    result: float | None
    stdout: str
    error: str
    is_tight: bool


async def run_verifier(
    source: str,
    seed: bytes | Path,
    current: bytes | Path,
    final_answer: str | None = None,
    conversation: Sequence[Any] | None = None,
    limits: VerifierLimits | None = None,
) -> VerifierExecution:
    """Never raises because of the source. `seed` and `current` are SQLite databases, as bytes or as files."""
    limits = limits or VerifierLimits()
    databases = [one if isinstance(one, bytes) else read_database(one) for one in (seed, current)]
    header = {
        "source": source,
        "final_answer": final_answer,
        "conversation": None if conversation is None else list(conversation),
        "sizes": [len(one) for one in databases],
        "memory_bytes": limits.memory_bytes,
        "cpu_s": math.ceil(limits.wall_s) + 1,
    }
    question = json.dumps(header).encode() + b"\n" + b"".join(databases)
    async with _room():
        outcome = await process.run_sandboxed(CHILD, question, limit_s=limits.wall_s, max_answer=MAX_ANSWER)
    if outcome.is_late:
        return VerifierExecution(success=False, error=f"the verifier did not finish within {limits.wall_s:g} s")
    return _execution(outcome)


def _room() -> asyncio.Semaphore:
    """Limits the number of verifiers at a time: a batch of episodes ends at once, and their time counts from when they
    run."""
    return _rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))


def read_database(file: Path) -> bytes:
    """Returns the present content, including its write-ahead log."""
    with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        return connection.serialize()


def _execution(outcome: process.ChildAnswer) -> VerifierExecution:
    """Converts the child's answer. A verifier can write into the pipe, too: an invalid answer is none."""
    try:
        found = msgspec.json.decode(outcome.answer, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return VerifierExecution(
            success=False, error=f"the verifier's process ended without an answer (status {outcome.status})"
        )
    if not found.is_tight:
        _warn_once()
    return VerifierExecution(success=found.success, result=found.result, stdout=found.stdout, error=found.error)


def _warn_once() -> None:
    global _has_warned  # noqa: PLW0603
    if not _has_warned:
        _has_warned = True
        log.warning(
            "verifiers run without a system-call filter here, which needs Linux; run only verifiers that you trust"
        )
