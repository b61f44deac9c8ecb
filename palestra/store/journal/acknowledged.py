"""The last request of each model that was acknowledged to its client, in one small file.

A journal that has lost its end does not know that it had more; this file does. It is written in place when the journal
has the request on disk, without a sync of its own: after a kill it is exact, after a power cut it may be behind, and it
is never ahead. Owns: the file. Never touches: the journal, what a request asks for.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from pathlib import Path

from palestra.store.errors import JournalError

log = logging.getLogger(__name__)

_SLOT = struct.Struct("<Iq116s")
"""Layout of a slot: crc32 of the rest, request number, model id. A slot that does not match its crc is free: it is
empty, or was torn by a power cut."""
_CRC_BYTES = 4
NOTHING = -1


class AcknowledgedRequests:
    """Keeps one slot for each model. If a slot cannot be written, the only effect is that a loss would not be
    noticed."""

    def __init__(self, file: Path):
        self.file = file
        try:
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as e:
            raise JournalError(f"cannot open {file}: {e.strerror}") from e
        self._seqs: dict[str, int] = {}
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        self._end = len(data) // _SLOT.size
        for slot in range(self._end):
            self._take(slot, data[slot * _SLOT.size : (slot + 1) * _SLOT.size])

    def _take(self, slot: int, record: bytes) -> None:
        crc, seq_id, padded = _SLOT.unpack(record)
        name = padded.rstrip(b"\0").decode(errors="replace")
        if name and crc == zlib.crc32(record[_CRC_BYTES:]):
            self._seqs[name], self._slots[name] = seq_id, slot
        else:
            self._free.append(slot)

    def last(self, model_id: str) -> int:
        """Returns the number of the last acknowledged request of a model; -1 if none is known."""
        return self._seqs.get(model_id, NOTHING)

    def note(self, model_id: str, seq_id: int) -> None:
        """Notes that everything up to this number is in the journal, or was given up there. The number never
        decreases."""
        if seq_id <= self.last(model_id):
            return
        slot = self._slots.get(model_id)
        if slot is None:
            slot = self._slots[model_id] = self._free.pop() if self._free else self._end
            self._end = max(self._end, slot + 1)
        self._seqs[model_id] = seq_id
        rest = _SLOT.pack(0, seq_id, model_id.encode())[_CRC_BYTES:]
        self._write(slot, zlib.crc32(rest).to_bytes(_CRC_BYTES, "little") + rest)

    def forget(self, model_id: str) -> None:
        slot = self._slots.pop(model_id, None)
        if slot is not None:
            del self._seqs[model_id]
            self._free.append(slot)
            self._write(slot, bytes(_SLOT.size))

    def forget_all_but(self, model_ids: set[str]) -> None:
        for model_id in self._slots.keys() - model_ids:
            self.forget(model_id)

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1  # otherwise a late note would go into another file

    def _write(self, slot: int, record: bytes) -> None:
        try:
            os.pwrite(self._fd, record, slot * _SLOT.size)
        except OSError as e:
            log.error("cannot write to %s: %s", self.file, e.strerror)
