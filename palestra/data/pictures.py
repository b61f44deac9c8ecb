"""Pictures of rows: found in parts and in columns, and written into messages as parts with URLs.

A row's pictures are parts with a source of their own, or those of the column `images` (or `image`), in the order of the
places that messages leave for them: `{"type": "image"}` or `<image>` in a text. Without such places they stand before
the first message of the user. A source is a file's path, a `data:` URL, a file in base64, or an object with `bytes` or
`path`, as Parquet files of the hub have it.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.data.errors import DatasetError
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject
from palestra.util.picture_headers import BadPicture, read_header
from palestra.util.picture_parts import DATA, FILE, file_path, has_pictures, is_picture, url_of, url_part

COLUMNS = ("images", "image")
FIELDS = {"messages": "", "prompt": "user", "completion": "", "response": "", "chosen": "", "rejected": ""}
"""Fields with messages; text in the one that names a role becomes its message."""
PLACE = "<image>"
SHORTEST_BASE64 = 64


def with_pictures(row: JsonMapping, folder: Path) -> JsonMapping:
    """Returns the row with all of its pictures in messages, as parts with `file:` or `data:` URLs. `folder`: where
    relative paths begin. Raises DatasetError, without a place."""
    column = next((name for name in COLUMNS if row.get(name)), None)
    fields = {name: _messages(row[name], role) for name, role in FIELDS.items() if name in row}
    if column is None and not any(has_pictures(messages) for messages in fields.values() if messages):
        if any(name in row for name in COLUMNS) and any(map(_asks_with_place, fields.values())):
            raise DatasetError(f"a text has {PLACE}, but the row's column of pictures is empty")
        return row
    sources = _sources(row[column], column, folder) if column is not None else []
    found: JsonObject = {name: value for name, value in row.items() if name != column}
    placed = False
    for name, messages in fields.items():
        if messages is not None:
            filler = PictureFiller(sources, folder, name)
            found[name] = filler.fill(messages)
            placed |= filler.used == len(sources)
    if not placed:
        first = "messages" if "messages" in fields else "prompt"
        found[first] = _before(found.get(first), sources, first)
    return found


def has_places(prompt: object) -> bool:
    """Whether a prompt has pictures, or leaves places for them."""
    if isinstance(prompt, str):
        return PLACE in prompt
    if not isinstance(prompt, list):
        return False
    contents = [one.get("content") for one in prompt if isinstance(one, Mapping)]
    texts = [part.get("text") for one in contents if isinstance(one, list) for part in one if isinstance(part, Mapping)]
    return has_pictures(prompt) or any(isinstance(one, str) and PLACE in one for one in [*contents, *texts])


def _asks_with_place(messages: list[Any] | None) -> bool:
    """Whether a message leaves a place; what the assistant writes stays as it is."""
    return has_places([one for one in messages or [] if isinstance(one, Mapping) and one.get("role") != "assistant"])


def shows_pictures(row: JsonMapping) -> bool:
    """Whether messages of such a row show pictures."""
    return any(has_pictures(row[name]) for name in FIELDS if isinstance(row.get(name), list))


class PictureFiller:
    """Puts a row's pictures into the messages of one field."""

    def __init__(self, sources: Sequence[str], folder: Path, name: str) -> None:
        self._sources, self._folder, self._name = sources, folder, name
        self.used = 0

    def fill(self, messages: Sequence[Any]) -> list[Any]:
        """Raises DatasetError also if there are more pictures than places, unless there are no places at all."""
        filled = [self._message(message) for message in messages]
        if 0 < self.used < len(self._sources):
            raise DatasetError(f"{self._name} has {self.used} places for the row's {len(self._sources)} pictures")
        return filled

    def _message(self, message: Any) -> Any:
        if not isinstance(message, Mapping) or message.get("role") == "assistant":
            return message
        content = message.get("content")
        if isinstance(content, str) and self._sources and PLACE in content:
            return {**message, "content": list(self._in_text(content))}
        if not isinstance(content, list):
            return message
        return {**message, "content": [one for part in content for one in self._part(part)]}

    def _part(self, part: Any) -> Iterator[Any]:
        if is_picture(part):
            source = url_of(part)
            yield url_part(self._next() if source is None else source_url(source, self._folder, self._name))
        elif isinstance(part, Mapping) and self._sources and PLACE in str(part.get("text", "")):
            yield from self._in_text(part["text"])
        else:
            yield part

    def _in_text(self, text: str) -> Iterator[JsonObject]:
        for number, piece in enumerate(text.split(PLACE)):
            if number:
                yield url_part(self._next())
            if piece:
                yield {"type": "text", "text": piece}

    def _next(self) -> str:
        if self.used == len(self._sources):
            raise DatasetError(
                f"{self._name} has more places for pictures than the row has pictures ({len(self._sources)}); they are "
                "in the column 'images', or in the parts themselves"
            )
        self.used += 1
        return self._sources[self.used - 1]


def source_url(source: object, folder: Path, where: str) -> str:
    """The URL of a picture. Raises DatasetError for files that are missing."""
    if isinstance(source, Mapping):
        if isinstance(data := source.get("bytes"), str):
            return f"{DATA};base64,{data}"
        source = source.get("path")
    if not isinstance(source, str) or not source:
        raise DatasetError(f"{where}: a picture should be a path, a data: URL or an object with bytes or path")
    if source.startswith(DATA):
        return source
    if "://" in source[:16] and not source.startswith(FILE):
        raise DatasetError(f"{where}: the picture {source[:60]!r} is not fetched; download it, and name its path")
    if _is_base64(source):
        return f"{DATA};base64,{source}"
    path = (file_path(source) if source.startswith(FILE) else folder / source).absolute()
    if not _is_file(path):
        raise DatasetError(f"{where}: there is no picture {str(path)[:200]}")
    return path.as_uri()


def with_moved_paths(row: JsonMapping, folder: Path, to: Path) -> JsonMapping:
    """Returns the row as it stands in a file in another folder: relative paths of its pictures lead there from `to`."""
    if folder.resolve() == to.resolve():
        return row
    moved: JsonObject = dict(row)
    for name in COLUMNS:
        if name in row:
            moved[name] = _moved(row[name], folder, to)
    for name in FIELDS:
        if isinstance(messages := row.get(name), list) and has_pictures(messages):
            moved[name] = [_with_moved_parts(message, folder, to) for message in messages]
    return moved


def _with_moved_parts(message: Any, folder: Path, to: Path) -> Any:
    if not has_pictures([message]):
        return message
    parts = [_moved(part, folder, to) if is_picture(part) else part for part in message["content"]]
    return {**message, "content": parts}


def _moved(value: Any, folder: Path, to: Path) -> Any:
    """A source, or what has sources, with paths from the other folder on. What names no file stays as it is."""
    if isinstance(value, Mapping):
        return {key: _moved(one, folder, to) for key, one in value.items()}
    if isinstance(value, list):
        return [_moved(one, folder, to) for one in value]
    if not isinstance(value, str) or not value or Path(value).is_absolute() or not _is_file(folder / value):
        return value
    return os.path.relpath(folder.resolve() / value, to.resolve())


def _sources(given: object, column: str, folder: Path) -> list[str]:
    entries = given if isinstance(given, list) else [given]
    return [source_url(entry, folder, f"{column}[{place}]") for place, entry in enumerate(entries)]


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for a name that is too long


def _is_base64(source: str) -> bool:
    """Whether it is a picture's file in base64, by its beginning."""
    if len(source) < SHORTEST_BASE64:
        return False
    try:
        read_header(base64.b64decode(source, validate=True))
    except binascii.Error:
        return False
    except BadPicture as error:
        return "is no " not in str(error)
    return True


def _messages(field: object, role: str) -> list[Any] | None:
    if isinstance(field, str) and role:
        return [{"role": role, "content": field}]
    return field if isinstance(field, list) else None


def _before(messages: list[Message] | None, sources: Sequence[str], name: str) -> list[Message]:
    """Puts all pictures before what the user says first."""
    for place, message in enumerate(messages or []):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            if not isinstance(content, str | list):
                raise DatasetError(f"{name}[{place}]: a message of the user has no content")
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            seen = {**message, "content": [*map(url_part, sources), *parts]}
            return [*(messages or [])[:place], seen, *(messages or [])[place + 1 :]]
    raise DatasetError(f"the row has {len(sources)} pictures, but no message of the user in {name!r}")
