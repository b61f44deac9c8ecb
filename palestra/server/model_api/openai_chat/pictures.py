"""Pictures of chat calls: found in messages, read, and found again among the tokens of the prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.pictures import PictureMark
from palestra.server.core.errors import Refusal
from palestra.server.core.pictures.locations import PictureError
from palestra.server.core.pictures.reader import EncodedPicture, PictureReader
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid
from palestra.server.model_api.model_resolver import SamplingTarget
from palestra.types import Picture, PlacedImage
from palestra.types.rollouts import Message

PICTURE_PARTS = ("image_url", "input_image")
"""Kinds of content parts that are pictures; both have the URL in `image_url`, as text or in an object."""
PLACE = "place"
"""Field of a part that says where it stood in a request of another API."""


@dataclass(frozen=True, slots=True)
class SeenPictures:
    """The pictures of a call."""

    found: Mapping[str, Picture] = field(default_factory=dict)
    """By their places in the request, in the order of the messages."""
    marks: Mapping[str, PictureMark] = field(default_factory=dict)
    """What stands for them in the text of messages, by the same places."""

    def placed(self, tokenizer: ChatTokenizer, ids: Sequence[int]) -> tuple[PlacedImage, ...]:
        """Returns the places of pictures in a prompt."""
        if not self.found:
            return ()
        assert tokenizer.pictures is not None
        try:
            starts = tokenizer.pictures.places(ids, list(self.marks.values()))
        except ChatError as e:
            raise invalid("messages", f"messages: {e}") from None
        digests = (picture.digest for picture in self.found.values())
        return tuple(PlacedImage(start, digest) for start, digest in zip(starts, digests, strict=True))

    @property
    def distinct(self) -> tuple[Picture, ...]:
        return tuple({picture.digest: picture for picture in self.found.values()}.values())


async def see(
    reader: PictureReader,
    owner: str,
    target: SamplingTarget,
    tokenizer: ChatTokenizer,
    messages: Sequence[Message] | None,
) -> SeenPictures:
    """Reads the pictures of an owner's messages. Where the model reads text only there are none: their parts are
    refused later, as others are that it cannot read."""
    card = target.card.vision
    if card is None or tokenizer.pictures is None:
        return SeenPictures()
    files = _files(messages or ())
    if not files:
        return SeenPictures()
    try:
        found = await reader.read_all(owner, files, card)
    except PictureError as e:
        where = _place(messages or (), e.name)
        raise invalid(where, f"{where}: {e}") from None
    except Refusal as e:
        raise invalid("messages", f"messages: {e.detail}") from None
    return SeenPictures(found, {at: PictureMark(one.digest, card.rows(one)) for at, one in found.items()})


def _place(messages: Sequence[Message], name: str) -> str:
    """Returns the place of a part in the request, by its name among files."""
    found = re.fullmatch(r"messages\[(\d+)\]\.content\[(\d+)\]", name)
    part = {} if found is None else messages[int(found[1])]["content"][int(found[2])]
    return str(part.get(PLACE) or name or "messages")


def _files(messages: Sequence[Message]) -> dict[str, EncodedPicture]:
    """Files by the places of their parts."""
    files: dict[str, EncodedPicture] = {}
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content) if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in PICTURE_PARTS:
                where = f"messages[{i}].content[{j}]"
                given = part.get("image_url")
                url = given.get("url") if isinstance(given, dict) else given
                if not isinstance(url, str) or not url:
                    raise invalid(
                        where, f"{where}: image_url is {shown(given)}; it must be a URL, such as data:image/…"
                    )
                files[where] = EncodedPicture(url=url)
    return files
