"""Decodes the pictures of datasets as a server does, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from palestra.chat import ChatError
from palestra.chat.picture_files import read_pictures
from palestra.config.serve import ServeLimits
from palestra.server.core.pictures.decoder import PictureDecoder
from palestra.server.core.pictures.locations import PictureError
from palestra.types import VisionCard
from palestra.types.pictures import PictureSizes
from palestra.types.rollouts import Message
from palestra.util.picture_parts import has_pictures

COMMON = VisionCard(sizes=PictureSizes.of_config({}, {}), image_token=0)
"""How Qwen3-VL and Qwen3.5 resize pictures: for datasets that are checked without a model."""


class PictureChecker:
    def __init__(self, runner: asyncio.Runner, decoder: PictureDecoder, card: VisionCard) -> None:
        self._runner, self._decoder, self._card = runner, decoder, card

    def check(self, messages: Sequence[Message]) -> None:
        """Raises ChatError."""
        if not has_pictures(messages):
            return
        for file in read_pictures(messages, self._card, opens_files=True).files:
            try:
                self._runner.run(self._decoder.decode(file.data, self._card))
            except PictureError as error:
                raise ChatError(f"{file.origin}: {error}") from None


@contextmanager
def picture_checker(card: VisionCard | None) -> Iterator[PictureChecker]:
    """`card`: that of the model; None if there is none."""
    with asyncio.Runner() as runner:
        decoder = PictureDecoder(ServeLimits())
        try:
            yield PictureChecker(runner, decoder, card or COMMON)
        finally:
            runner.run(decoder.close())
