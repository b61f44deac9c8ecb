"""Samples under way that go on with newer weights: asks a server of ours for it, and afterwards which drew what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from palestra.config.api_key import api_key
from palestra.rollouts.policy_sampler import SamplingError
from palestra.types.sampling import VersionSegment

TIMEOUT_S = 30.0
OLDER = 64
"""Samplers whose samples go on; those of earlier weights have long gone on with one of these."""


class _Change(msgspec.Struct):
    start: int
    sampling_session_id: str
    is_exact: bool


class _Changes(msgspec.Struct):
    sequences: dict[str, list[_Change]]


class ContinuedSamples:
    """The continued samples of one run; `open` makes it."""

    def __init__(self, http: httpx.AsyncClient | None, note: Callable[[str], None], *, keeps_keys: bool) -> None:
        self._http, self._note, self._keeps_keys = http, note, keeps_keys
        self._versions: dict[str, int] = {}
        """Versions of the run's samplers, by their names at the server, oldest first."""
        self._left: set[str] = set()
        """Samplers whose samples may have gone on with other weights."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str | None, note: Callable[[str], None], *, keeps_keys: bool
    ) -> AsyncIterator[ContinuedSamples]:
        """`url`: None means hosted Tinker, where a sample ends on the weights that it began with."""
        if url is None:
            note("hosted Tinker cannot give other weights to a sample under way: turns end on those they began with")
            yield cls(None, note, keeps_keys=keeps_keys)
            return
        async with httpx.AsyncClient(base_url=url, headers={"x-api-key": api_key()}, timeout=TIMEOUT_S) as http:
            yield cls(http, note, keeps_keys=keeps_keys)

    def add(self, name: str, version: int) -> None:
        """Notes a sampler of the run."""
        self._versions[name] = version

    async def go_on(self, name: str) -> None:
        """Lets samples of the run's earlier samplers go on with the weights of this one."""
        older = [one for one in list(self._versions)[-OLDER:] if one != name]
        if self._http is None or not older:
            return
        body = {"sampling_session_ids": older, "to": name, "keep_keys": self._keeps_keys}
        self._left.update(older)
        try:
            answer = await self._http.post("/api/v1/continue_samples", json=body)
            if answer.status_code in (404, 405):
                self._note("this server cannot give other weights to samples under way: they end on their own")
                self._http = None
            elif not answer.is_success:
                self._note(f"samples under way end on older weights: {answer.text[:200]}")
        except httpx.HTTPError as error:
            self._note(f"samples under way end on older weights: {str(error) or type(error).__name__}")

    async def segments(self, name: str, version: int, sequence_ids: Sequence[str]) -> list[list[VersionSegment]]:
        """Returns for each sequence that was requested of this sampler which versions drew it. Raises
        SamplingError."""
        changes: dict[str, list[_Change]] = {}
        if name in self._left and self._http is not None:
            changes = await self._changes(self._http, sequence_ids)
        return [self._segments(version, changes.get(one, [])) for one in sequence_ids]

    async def _changes(self, http: httpx.AsyncClient, sequence_ids: Sequence[str]) -> dict[str, list[_Change]]:
        body: dict[str, Any] = {"sequence_ids": list(sequence_ids)}
        try:
            answer = await http.post("/api/v1/sequence_weights", json=body)
            answer.raise_for_status()
            return msgspec.json.decode(answer.content, type=_Changes).sequences
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            reason = str(error) or type(error).__name__
            raise SamplingError(f"the server does not say which weights drew a sample: {reason}") from error

    def _segments(self, version: int, changes: Sequence[_Change]) -> list[VersionSegment]:
        found = [VersionSegment(0, version)]
        for change in changes:
            segment = VersionSegment(change.start, self._versions[change.sampling_session_id], change.is_exact)
            if found[-1].start == segment.start:
                found.pop()
            found.append(segment)
        return found
