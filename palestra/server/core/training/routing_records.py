"""The experts that sampled sequences visited, kept for training requests that name these sequences.

Kept in memory, the oldest ones dropped beyond a budget; what a training request found is in the journal with it. Owns:
these records. Never touches: what is done with them, the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.types import RoutedExperts, SampledSequence


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """A run of a datum's tokens, as a sampling request had them."""

    sequence_id: str
    offset: int
    length: int
    is_sampled: bool
    """Counted from the first sampled token; otherwise from the first of the prompt."""


Scope = tuple[str, str]
"""Owner and base model: records are found by the same only."""


@dataclass(frozen=True, slots=True)
class _Record:
    scope: Scope
    n_prompt: int
    routing: RoutedExperts

    @property
    def row_bytes(self) -> int:
        return len(self.routing.data) // max(1, self.routing.shape[0])

    def rows(self, span: ProvenanceSpan) -> bytes:
        """Returns the rows of a span; its last ones may be missing, since the last sampled token was never an input."""
        first = span.offset + (self.n_prompt if span.is_sampled else 0)
        return self.routing.data[first * self.row_bytes : (first + span.length) * self.row_bytes]


class RoutingRecords:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._size_bytes = max_bytes, 0
        self._records: dict[str, _Record] = {}

    def keep(self, scope: Scope, sequence_ids: Sequence[str], sequences: Sequence[SampledSequence]) -> None:
        """Takes the records out of finished samples."""
        for sequence_id, sequence in zip(sequence_ids, sequences, strict=False):
            routing, sequence.routing = sequence.routing, None
            if routing is not None and sequence_id not in self._records:
                n_prompt = routing.shape[0] - len(sequence.tokens) + 1
                self._records[sequence_id] = _Record(scope, n_prompt, routing)
                self._size_bytes += len(routing.data)
        while self._size_bytes > self._max_bytes:
            oldest = self._records.pop(next(iter(self._records)))
            self._size_bytes -= len(oldest.routing.data)

    def find(self, scope: Scope, spans: Sequence[ProvenanceSpan]) -> RoutedExperts | None:
        """The experts of a datum's tokens, which the spans cover; None if nothing was recorded."""
        records = [self._records.get(span.sequence_id) for span in spans]
        known = next((r for r in records if r is not None and r.scope == scope), None)
        if known is None:
            return None
        parts: list[bytes] = []
        for span, record in zip(spans, records, strict=True):
            rows = record.rows(span) if record is not None and record.scope == scope else b""
            parts.append(rows.ljust(span.length * known.row_bytes, b"\xff"))
        _, layers, per_token = known.routing.shape
        return RoutedExperts(data=b"".join(parts), shape=(sum(span.length for span in spans), layers, per_token))
