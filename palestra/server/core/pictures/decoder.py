"""Decodes files of pictures in a process of its own, and keeps what was decoded lately.

Owns: bounds of one file. Never touches: Pillow, requests, protocols.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from palestra.config.serve import ServeLimits
from palestra.server.core.pictures.decoding import DecodeAnswer, DecodeOrder
from palestra.server.core.pictures.locations import PictureError
from palestra.types import Picture, VisionCard
from palestra.types.pictures import PictureSizes, short_name
from palestra.util.answering_child import AnsweringChild, ChildDied, ChildTooLate

CHILD = "palestra.server.core.pictures.decoding_child"
LIMIT_S = 30.0  # of one picture; the largest that is read takes two
CACHE_BYTES = 64 << 20

Known = tuple[str, PictureSizes]


class PictureDecoder:
    def __init__(self, limits: ServeLimits):
        self._limits, self._child = limits, AnsweringChild(CHILD)
        self._known: OrderedDict[Known, Picture] = OrderedDict()
        """By the file's hash and how it was resized, the least recently used first."""
        self._known_bytes = 0

    async def close(self) -> None:
        await self._child.close()

    async def decode(self, file: bytes, card: VisionCard) -> Picture:
        """Raises PictureError, whose text names the file by its hash."""
        digest = hashlib.sha256(file).hexdigest()
        name = f"a picture ({len(file)} bytes, SHA-256 {short_name(digest)}…)"
        if len(file) > self._limits.max_picture_bytes:
            raise PictureError(
                f"{name} is too large; at most {self._limits.max_picture_bytes} bytes are read "
                "(limits.max_picture_bytes)"
            )
        key = (digest, card.sizes)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        order = DecodeOrder(
            file=file,
            sizes=card.sizes,
            max_file_pixels=self._limits.max_picture_pixels,
        )
        answer = await self._ask(msgspec.msgpack.encode(order))
        if answer.picture is None:
            raise PictureError(f"{name} cannot be read: {answer.problem}")
        self._keep(key, answer.picture)
        return answer.picture

    async def _ask(self, order: bytes) -> DecodeAnswer:
        """A process that dies is asked once more: the picture need not be what ended it."""
        try:
            try:
                answer = await self._child.ask(order, LIMIT_S)
            except ChildTooLate:
                raise
            except ChildDied:
                answer = await self._child.ask(order, LIMIT_S)
        except ChildTooLate:
            return DecodeAnswer(problem=f"decoding it takes more than {LIMIT_S:g} s; save it anew, as PNG or JPEG")
        except ChildDied:
            return DecodeAnswer(problem="the process that decodes pictures died of it; save it anew, as PNG or JPEG")
        return msgspec.msgpack.decode(answer, type=DecodeAnswer)

    def _keep(self, key: Known, picture: Picture) -> None:
        self._known[key] = picture
        self._known_bytes += len(picture.packed)
        while self._known_bytes > CACHE_BYTES and len(self._known) > 1:
            self._known_bytes -= len(self._known.popitem(last=False)[1].packed)
