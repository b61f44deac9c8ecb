"""Futures of clients: those of training requests survive a restart, those of samples may be lost. A sample that waits
for its worker keeps its encoded message.

Owns: the records and the waiting. Never touches: workers, files, what is in a message.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from enum import StrEnum
from weakref import WeakValueDictionary

import msgspec

from palestra.store.journal.journal import Position
from palestra.types.engine import Blame, EngineFailure, Sample, StreamedTokens, Trained, encode_message
from palestra.util.json_types import JsonObject


class RequestKind(StrEnum):
    CREATE_MODEL = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_WEIGHTS_EXTERNAL = "save_weights_external"
    LOAD_WEIGHTS = "load_weights"
    UNLOAD_MODEL = "unload_model"
    SAMPLE = "sample"

    @property
    def is_pass(self) -> bool:
        return self in (RequestKind.FORWARD, RequestKind.FORWARD_BACKWARD)


LOADING = (RequestKind.CREATE_MODEL, RequestKind.LOAD_WEIGHTS)
"""Kinds of requests that may read a checkpoint."""
SAVING = (RequestKind.SAVE_WEIGHTS, RequestKind.SAVE_WEIGHTS_FOR_SAMPLER, RequestKind.SAVE_WEIGHTS_EXTERNAL)
"""Kinds of requests that may write one."""
WITH_FOLDER = (*LOADING, *SAVING)
LONG_BYTES = 256  # a shorter prompt is less than the record about it


@dataclass(slots=True, eq=False)
class RequestFuture:
    request_id: str
    owner: str
    digest: bytes
    submitted: float = field(default_factory=time.monotonic)
    finished_at: float | None = None
    """Time by the wall clock."""
    frame: bytes | None = None
    """The worker's message, while it is kept in memory."""
    _waiters: list[asyncio.Future] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.finished_at is not None

    def finish(self, frame: bytes | None, at: float | None = None) -> None:
        self.frame, self.finished_at = frame, at or time.time()
        self.wake()

    def wake(self) -> None:
        """Wakes all who wait; also called when the server is about to stop: a held poll is then asked to retry."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        if self.is_done:
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        timer = waiter.get_loop().call_later(timeout_s, lambda: waiter.done() or waiter.set_result(None))
        try:
            await waiter
        finally:
            timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return self.is_done


@dataclass(slots=True, eq=False, kw_only=True)
class TrainFuture(RequestFuture):
    model_id: str
    seq_id: int
    kind: RequestKind
    reply: JsonObject
    size: int = 0
    """Size of the message in bytes: the sum of waiting ones is limited."""
    message: bytes | None = None
    """The encoded `Train` message until it is this request's turn; afterwards the journal has it."""
    durable: asyncio.Future[None] | None = None
    """Resolves when the request is on disk; None when it is."""
    is_finishing: bool = False
    """Whether its result has arrived and is being processed."""
    is_failed: bool = False
    """Whether it is done without any effect on the model."""
    request_at: Position | None = None
    """Where the journal holds the request, until a snapshot covers it."""
    result_at: Position | None = None

    def failed(self, reason: str) -> Trained:
        failure = EngineFailure(message=reason, blame=Blame.USER)
        return Trained(request_id=self.request_id, model_id=self.model_id, seq_id=self.seq_id, outcome=failure)


@dataclass(slots=True, eq=False, kw_only=True)
class SampleFuture(RequestFuture):
    sampler_id: str
    seq_id: int
    sequence_ids: list[str]
    message: SampleMessage | None
    """The `Sample` message for the worker, to send it again if the worker dies; None when done."""
    is_sent: bool = False
    """Whether it was sent to the living worker."""
    is_failed: bool = False
    read_at: float | None = None
    """When its result was first read, by the wall clock."""
    parts: asyncio.Queue[StreamedTokens | None] | None = None
    """What was sampled of a stream so far. None in it: the future is done, or the server is about to stop."""
    has_told: bool = False
    """Whether a part of it was sent to the client: then it cannot be sampled again."""
    prompt_tokens: int = 0
    picture_bytes: int = 0
    """Size of the pictures in its message."""
    streamed_tokens: int = 0

    def note_read(self) -> None:
        self.read_at = self.read_at or time.time()

    def tell(self, part: StreamedTokens) -> None:
        if self.parts is not None:
            self.has_told = True
            self.streamed_tokens += len(part.tokens)
            self.parts.put_nowait(part)

    def wake(self) -> None:
        RequestFuture.wake(self)
        if self.parts is not None:
            self.parts.put_nowait(None)


def digest_of(kind: RequestKind, message: bytes, reply: JsonObject) -> bytes:
    """Returns a hash of a client's request: if its number is repeated, the content must be the same."""
    digest = hashlib.blake2b(message, digest_size=16)
    digest.update(msgspec.msgpack.encode((kind, reply)))
    return digest.digest()


@dataclass(slots=True, eq=False, weakref_slot=True)
class SharedPrompt:
    encoded: bytes


@dataclass(frozen=True, slots=True, eq=False)
class SampleMessage:
    """A `Sample` for the worker, in the parts before, of and after its prompt and pictures."""

    head: bytes
    prompt: SharedPrompt | None = None
    tail: bytes = b""

    def encode(self) -> bytes:
        return self.head if self.prompt is None else b"".join((self.head, self.prompt.encoded, self.tail))


class SampleMessages:
    """Encodes samples. Equal prompts, with their pictures, are kept once, as the samples of a group have."""

    def __init__(self) -> None:
        self._prompts: WeakValueDictionary[bytes, SharedPrompt] = WeakValueDictionary()
        """By hash, as long as a message has them."""

    def make(self, sample: Sample) -> SampleMessage:
        message, prompt = encode_message(sample), msgspec.msgpack.encode(sample.request.prompt)
        if sample.request.pictures:  # these follow the prompt
            pictures = msgspec.msgpack.encode(sample.request.pictures)
            prompt = message[message.index(prompt) : message.index(pictures) + len(pictures)]
        if len(prompt) < LONG_BYTES:
            return SampleMessage(message)
        digest = hashlib.blake2b(prompt, digest_size=16).digest()
        shared = self._prompts.get(digest)
        if shared is None:
            shared = self._prompts[digest] = SharedPrompt(prompt)
        head, _, tail = message.partition(prompt)
        return SampleMessage(head, shared, tail)
