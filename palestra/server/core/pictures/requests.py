"""Requests with files of pictures become requests with pictures: each gets its places among the tokens.

Owns: replacing files by what was decoded. Never touches: protocols, decoding.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from palestra.server.core.errors import Refusal
from palestra.server.core.pictures.reader import EncodedPicture, PictureReader
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.types import Datum, ImageChunk, Picture, PlacedImage, SampleRequest, VisionCard
from palestra.types.engine import Pass

Files = Mapping[str, EncodedPicture]
"""By the names that stand in place of digests until they are decoded."""


def vision_card(worker: WorkerSupervisor) -> VisionCard:
    """Raises Refusal where the base model reads text only."""
    if worker.card is None:
        raise Refusal(503, "the engine is starting; send the request with pictures again", retry_after_s=2.0)
    if worker.card.vision is None:
        raise Refusal(400, f"{worker.name} reads text only on this server; send tokens, and no pictures")
    return worker.card.vision


async def with_pictures(owner: str, operation: Pass, files: Files, reader: PictureReader, card: VisionCard) -> Pass:
    """A pass whose image chunks name files. Raises PictureError."""
    found = await reader.read_all(owner, files, card)
    data = [_seeing(datum, found) for datum in operation.data]
    return replace(operation, data=data, pictures=_distinct(found))


def first_datum_with(operation: Pass, name: str = "") -> int:
    """Number of the first datum that names this file, or any."""
    return next(
        n
        for n, datum in enumerate(operation.data)
        if any(isinstance(chunk, ImageChunk) and name in (chunk.digest, "") for chunk in datum.chunks)
    )


async def placed(
    owner: str, request: SampleRequest, files: Files, reader: PictureReader, card: VisionCard
) -> SampleRequest:
    """A prompt whose images name files, and stand between its tokens without taking positions yet. Raises
    PictureError."""
    found = await reader.read_all(owner, files, card)
    prompt: list[int] = []
    images: list[PlacedImage] = []
    at = 0
    for image in request.images:
        prompt += request.prompt[at : image.start]
        picture, at = found[image.digest], image.start
        images.append(PlacedImage(len(prompt), picture.digest))
        prompt += [card.image_token] * card.rows(picture)
    prompt += request.prompt[at:]
    return replace(request, prompt=tuple(prompt), images=tuple(images), pictures=_distinct(found))


def _seeing(datum: Datum, found: Mapping[str, Picture]) -> Datum:
    chunks = [ImageChunk(found[c.digest].digest) if isinstance(c, ImageChunk) else c for c in datum.chunks]
    return replace(datum, chunks=tuple(chunks))


def _distinct(found: Mapping[str, Picture]) -> tuple[Picture, ...]:
    return tuple({picture.digest: picture for picture in found.values()}.values())
