"""Encoded samples that wait: equal prompts, with their pictures, are kept once, as the samples of a group have.

Owns: how a message is kept. Never touches: what is in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from weakref import WeakValueDictionary

import msgspec

from palestra.types.engine import Sample, encode_message

LONG_BYTES = 256  # a shorter prompt is less than the record about it


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
