"""Pictures of conversations as training reads them: files in the parts of messages, and their places among tokens.

A part is `{"type": "image_url", "image_url": {"url": …}}`, `{"type": "input_image", "image_url": …}` or `{"type":
"image", "image": …}`. Its URL is a `data:` URL, a `file:` URL where the caller allows files, or `picture:` and the
digest of a file that the caller has.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from stat import S_ISREG
from urllib.parse import unquote_to_bytes

from palestra.chat.errors import ChatError
from palestra.chat.pictures import SCHEME, PictureMark, PictureTokens
from palestra.types.pictures import PictureFile, PromptPicture, UnfitPicture, VisionCard
from palestra.util.json_types import JsonMapping, JsonObject
from palestra.util.picture_headers import BadPicture, read_header
from palestra.util.picture_parts import DATA, FILE, data_url, file_path, has_pictures, is_picture, url_of, url_part

SHOWN = 60
NO_FILES: Mapping[str, PictureFile] = {}


TEXT_ONLY = (
    "a message has a picture, but this model reads text only: its folder has no vision tower of a family that Palestra "
    "reads; use Qwen3-VL, Qwen3.5 or Gemma 4, or leave pictures out"
)


class TextOnlyModel(ChatError):
    """A message has a picture, and the model reads text only."""


@dataclass(frozen=True, slots=True)
class SeenMessages:
    """Messages whose pictures were read."""

    messages: list[JsonObject]
    """The messages with marks in place of pictures, for a template."""
    files: list[PictureFile] = field(default_factory=list)
    """The files in the order of the messages."""
    marks: list[PictureMark] = field(default_factory=list)
    """What stands for each of them."""
    shown: list[JsonObject] = field(default_factory=list)
    """The messages with URLs that name files by their digests, for records."""

    def placed(self, tokens: PictureTokens | None, ids: Sequence[int], offset: int = 0) -> list[PromptPicture]:
        """Finds the pictures among these ids, which begin at `offset` of the conversation. Raises ChatError."""
        if not self.files:
            return []
        assert tokens is not None  # without them `read_pictures` refuses
        starts = tokens.places(ids, self.marks)
        found = zip(starts, self.marks, self.files, strict=True)
        return [PromptPicture(offset + start, mark.rows, file) for start, mark, file in found]


def read_pictures(
    messages: Sequence[JsonMapping],
    card: VisionCard | None,
    known: Mapping[str, PictureFile] = NO_FILES,
    *,
    opens_files: bool = False,
    source: str = "",
) -> SeenMessages:
    """Reads the pictures of messages. `card`: None if the model reads text only. `known`: files by their digests.
    `opens_files`: whether `file:` URLs are read. `source`: the row or task of the messages, for the origins of files.
    Raises ChatError."""
    seen = SeenMessages([], [], [], [])
    for place, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not any(map(is_picture, content)):
            seen.messages.append(dict(message))
            seen.shown.append(dict(message))
            continue
        if card is None:
            raise TextOnlyModel(TEXT_ONLY)
        if message.get("role") == "assistant":
            raise ChatError(f"messages[{place}]: an answer of the assistant has a picture; models write text only")
        texts, shown = [], []
        for at, part in enumerate(content):
            if is_picture(part):
                file, mark = _read(part, f"messages[{place}].content[{at}]", card, known, opens_files, source)
                seen.files.append(file)
                seen.marks.append(mark)
                texts.append(mark.text)
                shown.append(url_part(f"{SCHEME}{file.digest}"))
            else:
                texts.append(_text(part, f"messages[{place}].content[{at}]"))
                shown.append(part)
        seen.messages.append({**message, "content": "".join(texts)})
        seen.shown.append({**message, "content": shown})
    return seen


def picture_file(data: bytes, origin: str = "") -> PictureFile:
    """Raises BadPicture."""
    header = read_header(data)
    return PictureFile(
        digest=hashlib.sha256(data).hexdigest(),
        data=data,
        media_type=header.media_type,
        height=header.height,
        width=header.width,
        origin=origin,
    )


def with_opened_files(messages: Sequence[JsonMapping]) -> list[JsonObject]:
    """Messages with `data:` URLs in place of `file:` ones. Raises ChatError."""
    return [{**one, "content": _opened(one["content"])} if has_pictures([one]) else dict(one) for one in messages]


def _opened(content: Sequence[JsonMapping]) -> list[JsonObject]:
    parts: list[JsonObject] = []
    for part in content:
        url = url_of(part) if is_picture(part) else None
        if isinstance(url, str) and url.startswith(FILE):
            data = _at_path(url)
            try:
                part = url_part(data_url(data, read_header(data).media_type))
            except BadPicture as error:
                raise ChatError(f"the picture {file_path(url)} {error}") from None
        parts.append(dict(part))
    return parts


def _read(
    part: JsonMapping, where: str, card: VisionCard, known: Mapping[str, PictureFile], opens_files: bool, source: str
) -> tuple[PictureFile, PictureMark]:
    url = url_of(part)
    if not isinstance(url, str) or not url:
        raise ChatError(f"{where}: a picture's part has no URL; it should be data:image/png;base64,…")
    name = f"{where}: the picture"
    try:
        if url.startswith(SCHEME):
            file = known.get(url.removeprefix(SCHEME))
            if file is None:
                raise ChatError(f"{name} {url[: len(SCHEME) + 12]} is not there any more; send the file itself")
        elif url.startswith(FILE) and opens_files:
            name = f"{where}: the picture {file_path(url)}"
            file = picture_file(_at_path(url), _origin(source, name))
        elif url.startswith(DATA):
            file = picture_file(_in_url(url, where), _origin(source, name))
        else:
            shown = url if len(url) <= SHOWN else f"{url[:SHOWN]}…"
            raise ChatError(f"{where}: a picture at {shown!r} is not fetched; send the file as data:image/png;base64,…")
        return file, PictureMark(file.digest, card.rows_of_file(file))
    except BadPicture as error:
        raise ChatError(f"{name} {error}") from None
    except UnfitPicture as error:
        raise ChatError(f"{name} cannot be read: {error}") from None


def _origin(source: str, name: str) -> str:
    return f"{source}: {name}" if source else name


def _text(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise ChatError(f"{where}: a part of type {kind!r}; models read text and pictures")
    return text


def _in_url(url: str, where: str) -> bytes:
    head, comma, content = url.partition(",")
    if not comma:
        raise ChatError(f"{where}: a picture's data: URL has no comma; it should be data:image/png;base64,…")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(content)
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ChatError(f"{where}: a picture's data is not base64 ({error})") from None


def _at_path(url: str) -> bytes:
    path = file_path(url)
    try:
        if not S_ISREG(path.stat().st_mode):  # a device or a pipe may have no end
            raise ChatError(f"the picture {path} cannot be read: it is not a regular file")
        return path.read_bytes()
    except OSError as error:
        raise ChatError(f"the picture {path} cannot be read: {error.strerror}") from None
