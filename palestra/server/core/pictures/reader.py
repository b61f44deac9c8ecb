"""Reads the pictures of requests: bounds, a process that decodes, and what was decoded lately.

Owns: what is refused before a request is accepted. Never touches: Pillow, protocols, the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from palestra.chat.pictures import SCHEME
from palestra.config.serve import ServeLimits
from palestra.server.core.pictures.decoding import DecodeAnswer, DecodeOrder
from palestra.server.core.pictures.locations import PictureError, file_at
from palestra.server.core.pictures.picture_cache import PictureCache
from palestra.types import Picture, VisionCard
from palestra.util.answering_child import AnsweringChild, ChildDied, ChildTooLate

CHILD = "palestra.server.core.pictures.decoding_child"
LIMIT_S = 30.0  # of one picture; the largest that is read takes two
CACHE_BYTES = 64 << 20

Known = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A file that a request has, or names."""

    file: bytes = b""
    url: str = ""
    """Where it is, if it did not come with the request itself."""
    expected_rows: int | None = None
    """How many positions the client thinks that it takes."""

    @property
    def key(self) -> str:
        return hashlib.sha256(self.file or self.url.encode()).hexdigest()


class PictureReader:
    def __init__(self, limits: ServeLimits, cache: PictureCache, hosts: Collection[str] = ()):
        """`hosts`: from where pictures may be fetched."""
        self._limits, self.cache, self._hosts = limits, cache, frozenset(host.lower() for host in hosts)
        self._child = AnsweringChild(CHILD)
        self._known: OrderedDict[Known, Picture] = OrderedDict()
        """By the file's hash and how it was resized, the least recently used first."""
        self._known_bytes = 0

    async def read_all(self, files: Mapping[str, EncodedPicture], card: VisionCard) -> dict[str, Picture]:
        """Pictures by the names that their files have in the request. Raises PictureError, with the name of one."""
        most = self._limits.max_pictures
        if len(files) > most:
            raise PictureError(f"the request has {len(files)} pictures; at most {most} are read (limits.max_pictures)")
        found: dict[str, Picture] = {}
        pixels = 0
        for name, encoded in files.items():
            try:
                picture = found[name] = await self._picture(encoded, card)
            except PictureError as e:
                e.name = name
                raise
            rows, expected = card.rows(picture), encoded.expected_rows
            if expected is not None and expected != rows:
                raise PictureError(f"Expected {expected} tokens, got {rows} from image")
            pixels += picture.height * picture.width
            if pixels > self._limits.max_request_pixels:
                raise PictureError(
                    f"the pictures of the request have more than {self._limits.max_request_pixels} pixels together "
                    "(limits.max_request_pixels); send fewer or smaller ones"
                )
        return found

    async def close(self) -> None:
        await self._child.close()

    async def _picture(self, encoded: EncodedPicture, card: VisionCard) -> Picture:
        if not encoded.url:
            return await self._read(encoded.file, card)
        if not encoded.url.startswith(SCHEME):
            return await self._read(await file_at(encoded.url, self._hosts, self._limits.max_picture_bytes), card)
        digest = encoded.url.removeprefix(SCHEME)
        picture = await asyncio.to_thread(self.cache.find, digest)
        if picture is None or picture.height % card.multiple or picture.width % card.multiple:
            raise PictureError(f"picture {digest[:12]} is not kept here any more for this model; send it again")
        return picture

    async def _read(self, file: bytes, card: VisionCard) -> Picture:
        if len(file) > self._limits.max_picture_bytes:
            raise PictureError(
                f"a picture has {len(file)} bytes; at most {self._limits.max_picture_bytes} are read "
                "(limits.max_picture_bytes)"
            )
        key = (hashlib.sha256(file).hexdigest(), card.multiple, card.min_pixels, card.max_pixels)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        order = DecodeOrder(
            file=file,
            multiple=card.multiple,
            min_pixels=card.min_pixels,
            max_pixels=card.max_pixels,
            max_file_pixels=self._limits.max_picture_pixels,
        )
        answer = await self._ask(msgspec.msgpack.encode(order))
        if answer.picture is None:
            raise PictureError(f"a picture of {len(file)} bytes cannot be read: {answer.problem}")
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
