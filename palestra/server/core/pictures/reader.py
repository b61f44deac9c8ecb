"""Reads the pictures of requests: finds their files, has them decoded, checks the bounds of a request.

Owns: what is refused before a request is accepted. Never touches: Pillow, protocols, the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from palestra.chat.pictures import SCHEME
from palestra.config.serve import ServeLimits
from palestra.server.core.pictures.decoder import PictureDecoder
from palestra.server.core.pictures.locations import PictureError, file_at
from palestra.server.core.pictures.picture_cache import PictureCache
from palestra.types import Picture, VisionCard
from palestra.types.pictures import short_name


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

    @property
    def short_key(self) -> str:
        return short_name(self.key)


class PictureReader:
    def __init__(self, limits: ServeLimits, cache: PictureCache, hosts: Collection[str] = ()):
        """`hosts`: from where pictures may be fetched."""
        self._limits, self.cache, self._hosts = limits, cache, frozenset(host.lower() for host in hosts)
        self._decoder = PictureDecoder(limits)

    async def read_all(self, owner: str, files: Mapping[str, EncodedPicture], card: VisionCard) -> dict[str, Picture]:
        """Pictures by the names that their files have in the request of this owner. Raises PictureError, with the name
        of one."""
        most = self._limits.max_pictures
        if len(files) > most:
            raise PictureError(f"the request has {len(files)} pictures; at most {most} are read (limits.max_pictures)")
        found: dict[str, Picture] = {}
        pixels = 0
        for name, encoded in files.items():
            try:
                picture = found[name] = await self._picture(owner, encoded, card)
            except PictureError as e:
                e.name = name
                raise
            rows, expected = card.rows(picture), encoded.expected_rows
            if expected is not None and expected != rows:
                wrong = PictureError(
                    f"Expected {expected} tokens, got {rows} from image (SHA-256 {encoded.short_key}…)"
                )
                wrong.name = name
                raise wrong
            pixels += picture.height * picture.width
            if pixels > self._limits.max_request_pixels:
                raise PictureError(
                    f"the pictures of the request have more than {self._limits.max_request_pixels} pixels together "
                    "(limits.max_request_pixels); send fewer or smaller ones"
                )
        return found

    async def close(self) -> None:
        await self._decoder.close()

    async def _picture(self, owner: str, encoded: EncodedPicture, card: VisionCard) -> Picture:
        if not encoded.url:
            return await self._decoder.decode(encoded.file, card)
        if not encoded.url.startswith(SCHEME):
            return await self._decoder.decode(
                await file_at(encoded.url, self._hosts, self._limits.max_picture_bytes), card
            )
        digest = encoded.url.removeprefix(SCHEME)
        picture = await asyncio.to_thread(self.cache.find, owner, digest)
        if picture is None or not card.sizes.has(picture.height, picture.width):
            raise PictureError(f"picture {digest[:12]} is not kept here any more for this model; send it again")
        return picture
