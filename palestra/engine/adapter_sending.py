"""Adapters that the server asks for, to hand them to replicas: they go up the link in parts.

Owns: those that wait for their model, the parts. Never touches: where weights are kept, who samples from them.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from palestra.engine.backend import AdapterCopy, ComputeBackend, Weights
from palestra.engine.files import FileThread
from palestra.engine.queues import ModelTable, failure_of
from palestra.engine.sampler_cache import SamplerCache
from palestra.types import LoraConfig
from palestra.types.engine import (
    PART_BYTES,
    AdapterPart,
    AdapterRefused,
    FromWorker,
    KeptSampler,
    SavedAdapter,
    SendAdapter,
)

log = logging.getLogger(__name__)

PARTS_AT_ONCE = 4  # some milliseconds


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    file: bytes
    digest: str
    lora: LoraConfig

    @classmethod
    def of(cls, copy: AdapterCopy) -> PackedAdapter:
        file = copy.pack()
        return cls(file, hashlib.sha256(file).hexdigest(), copy.lora)

    def part(self, transfer_id: str, offset: int) -> AdapterPart:
        return AdapterPart(
            transfer_id=transfer_id,
            digest=self.digest,
            size_bytes=len(self.file),
            offset=offset,
            data=self.file[offset : offset + PART_BYTES],
            lora=self.lora,
        )


class AdapterSender:
    def __init__(
        self,
        backend: ComputeBackend,
        table: ModelTable,
        sampler_cache: SamplerCache,
        files: FileThread,
        send: Callable[[FromWorker], None],
    ):
        self.backend, self.table, self.sampler_cache, self.files, self._send = (
            backend,
            table,
            sampler_cache,
            files,
            send,
        )
        self._waiting: dict[str, list[SendAdapter]] = {}
        """By the model whose request will make their sampler."""
        self._outgoing: deque[Callable[[], AdapterPart]] = deque()
        """Parts that are not sent yet, made when they are."""

    def add(self, request: SendAdapter) -> None:
        weights = request.weights
        if isinstance(weights, KeptSampler) and self.sampler_cache.is_awaited(weights, self.table):
            self._waiting.setdefault(weights.model_id, []).append(request)
            return
        try:
            copy = self.backend.copy_adapter(self._weights(weights))
        except Exception as e:
            self._refuse(request, e)
            return
        self.files.submit(lambda: PackedAdapter.of(copy), lambda packed, error: self._packed(request, packed, error))

    @property
    def has_work(self) -> bool:
        return bool(self._outgoing)

    def send_some(self) -> None:
        """A few parts: other work comes between those of a large adapter."""
        for _ in range(min(PARTS_AT_ONCE, len(self._outgoing))):
            self._send(self._outgoing.popleft()())

    def recheck(self, model_id: str) -> None:
        """The model has moved on, or is gone."""
        for request in self._waiting.pop(model_id, []):
            self.add(request)

    def forget_all(self) -> None:
        self._waiting.clear()
        self._outgoing.clear()

    def _weights(self, weights: KeptSampler | SavedAdapter) -> Weights:
        if isinstance(weights, SavedAdapter):
            return self.sampler_cache.open(weights.folder)
        return self.sampler_cache.get(weights.sampler_id)

    def _packed(self, request: SendAdapter, packed: PackedAdapter | None, error: Exception | None) -> None:
        if packed is None:
            self._refuse(request, error or RuntimeError("nothing was packed"))
            return
        log.info("sending_adapter digest=%s bytes=%d", packed.digest[:12], len(packed.file))
        offsets = range(0, len(packed.file), PART_BYTES)
        self._outgoing.extend(partial(packed.part, request.transfer_id, offset) for offset in offsets)

    def _refuse(self, request: SendAdapter, error: Exception) -> None:
        failure = failure_of(error, f"SendAdapter weights={request.weights}")
        self._send(AdapterRefused(transfer_id=request.transfer_id, failure=failure))
