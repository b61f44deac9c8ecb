"""Conversations and preference pairs: the forms that a row may have.

For SFT: `{"messages": [...], "tools": [...]}`, or `{"prompt": ..., "completion": ...}` (also called `response`). For
DPO: `{"prompt": ..., "chosen": ..., "rejected": ...}`. For KTO these, or `{"prompt": ..., "completion": ..., "label":
true}`. A prompt is text (the user's) or messages, an answer is text (the assistant's) or messages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from palestra.data.errors import DatasetError, RowPlace
from palestra.data.pictures import shows_pictures, with_pictures
from palestra.data.rows import RawRow, read_rows, shown
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject
from palestra.util.suggest import did_you_mean

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
CHECKED_ROWS = 32
"""How many rows are encoded before a run begins: what a template refuses in one row it usually refuses in all."""
SHAREGPT_HINT = "; to convert ShareGPT's form: palestra data convert FILE OUT --to messages"


class Conversation(msgspec.Struct, frozen=True):
    messages: list[Message]
    tools: list[JsonObject] | None = None
    first: int = 0
    """Index of the first message after the prompt: assistant messages from here on are trained on."""


class PreferencePair(msgspec.Struct, frozen=True):
    chosen: Conversation
    rejected: Conversation


class LabelledAnswer(msgspec.Struct, frozen=True):
    conversation: Conversation
    is_desirable: bool


class ConversationFile(Generic[T]):
    """A file of conversations. All lines are checked when the file is read. A line is parsed again when it is used,
    because parsed lines take much more memory than their bytes."""

    def __init__(self, source: Path, parse: Callable[[JsonMapping], T]) -> None:
        """Raises DatasetError."""
        self._parse = parse
        self._rows: list[RawRow] = []
        self.first_picture: RowPlace | None = None
        """The first row that has pictures."""
        for row in read_rows(source):
            content = content_of(row)
            parse_content(content, row.place, parse)
            if self.first_picture is None and shows_pictures(content):
                self.first_picture = row.place
            self._rows.append(row)
        if not self._rows:
            raise DatasetError(f"{source} is empty; it should hold one JSON object in each line")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> T:
        row = self._rows[index]
        return parse_content(content_of(row), row.place, self._parse)

    @property
    def lines(self) -> list[bytes]:
        """The lines as they are in the file, but for pictures, whose paths are absolute."""
        if self.first_picture is None:
            return [row.line for row in self._rows]
        return [msgspec.json.encode(content_of(row)) for row in self._rows]

    def place(self, index: int) -> RowPlace:
        return self._rows[index].place


def content_of(row: RawRow) -> JsonMapping:
    """What a row says, with its pictures in messages. Raises DatasetError with the place of the row."""
    return parse_content(row.content(), row.place, lambda content: with_pictures(content, Path(row.place.file).parent))


def parse_content(content: JsonMapping, place: RowPlace, parse: Callable[[JsonMapping], T]) -> T:
    """Raises DatasetError with the place of the row."""
    try:
        return parse(content)
    except DatasetError as error:
        raise DatasetError(error.problem, place) from None


def conversation_of(row: JsonMapping) -> Conversation:
    """Returns the conversation of a line of an SFT file. Raises DatasetError without the line number."""
    if "messages" in row:
        return Conversation(_messages(row, "messages"), _tools(row))
    if "prompt" not in row:
        hint = SHAREGPT_HINT if "conversations" in row else ""
        raise DatasetError(f"neither 'messages' nor 'prompt' ({_keys(row)}){hint}")
    answer = "completion" if "completion" in row else "response"
    return _continued(row, answer)


def pair_of(row: JsonMapping) -> PreferencePair:
    """Returns the preference pair of a line of a DPO file. Raises DatasetError without the line number."""
    return PreferencePair(_continued(row, "chosen"), _continued(row, "rejected"))


def labelled_of(row: JsonMapping) -> list[LabelledAnswer]:
    """Returns the labelled answers of a line: one, or the two of a pair. Raises DatasetError without the line
    number."""
    if "chosen" in row or "rejected" in row:
        pair = pair_of(row)
        return [LabelledAnswer(pair.chosen, True), LabelledAnswer(pair.rejected, False)]
    answer = _continued(row, "completion" if "completion" in row else "response")
    if not isinstance(label := row.get("label"), bool):
        raise DatasetError(f"'label' should be true or false, but is {shown(label)} ({_keys(row)})")
    return [LabelledAnswer(answer, label)]


def _continued(row: JsonMapping, key: str) -> Conversation:
    prompt = _messages(row, "prompt", role="user")
    answer = _messages(row, key, role="assistant")
    if answer[: len(prompt)] == prompt:
        answer = answer[len(prompt) :]  # some datasets repeat the prompt in the answer
    if not any(message["role"] == "assistant" for message in answer):
        raise DatasetError(f"{key!r} has no text of the assistant")
    return Conversation(prompt + answer, _tools(row), first=len(prompt))


def _messages(row: JsonMapping, key: str, role: str | None = None) -> list[Message]:
    """Reads messages from a field. If the field is text, it becomes one message of role `role`."""
    if key not in row:
        raise DatasetError(f"no {key!r} ({_keys(row)})")
    found = row[key]
    if role is not None and isinstance(found, str):
        return [{"role": role, "content": found}]
    if not isinstance(found, list) or not found:
        expected = "a list of messages" if role is None else "text or a list of messages"
        raise DatasetError(f"{key!r} should be {expected}, but is {shown(found)}")
    for place, message in enumerate(found):
        _check_message(message, f"{key}[{place}]")
    return found


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise DatasetError(f"{where} should be an object with role and content, but is {shown(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        hint = did_you_mean(role, ROLES)
        raise DatasetError(f"{where}: unknown role {shown(role)}; {hint}")
    is_call = content is None and role == "assistant" and message.get("tool_calls")
    if not is_call and not isinstance(content, str | list):
        raise DatasetError(f"{where}: content should be text or a list of parts, but is {shown(content)}")


def _tools(row: JsonMapping) -> list[JsonObject] | None:
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DatasetError(f"'tools' should be a list of objects, but is {shown(tools)}")
    return tools or None


def _keys(row: JsonMapping) -> str:
    return f"it has {shown(', '.join(row))}" if row else "it is empty"
