"""Files of conversations: JSONL, one example in each line.

Owns: reading, the forms a line may have, reporting which line is wrong. Never touches: tokens.

For SFT: `{"messages": [...], "tools": [...]}`, or `{"prompt": ..., "completion": ...}` (also called `response`). For
DPO: `{"prompt": ..., "chosen": ..., "rejected": ...}`. A prompt is text (the user's) or messages, an answer is text
(the assistant's) or messages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject
from palestra.util.suggest import did_you_mean

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
CHECKED_ROWS = 32
"""How many rows are encoded before a run begins: what a template refuses in one row it usually refuses in all."""
SHOWN_CHARS = 60


class DatasetError(ValueError):
    """A file, or a line of it, cannot be trained on; the message says which, and why."""


class Conversation(msgspec.Struct, frozen=True):
    messages: list[Message]
    tools: list[JsonObject] | None = None
    first: int = 0
    """Index of the first message after the prompt: assistant messages from here on are trained on."""


class PreferencePair(msgspec.Struct, frozen=True):
    chosen: Conversation
    rejected: Conversation


class ConversationFile(Generic[T]):
    """A file of conversations. All lines are checked when the file is read. A line is parsed again when it is used,
    because parsed lines take much more memory than their bytes."""

    def __init__(self, file: Path, parse: Callable[[JsonMapping], T]) -> None:
        """Raises DatasetError."""
        self._file, self._parse = file.expanduser(), parse
        self._lines = _read_lines(self._file)
        for index in range(len(self)):
            self[index]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> T:
        _, line = self._lines[index]
        try:
            return self._parse(_object_of(line))
        except DatasetError as error:
            raise DatasetError(f"{self.where(index)}: {error}") from None

    @property
    def lines(self) -> list[bytes]:
        """The lines as they are in the file."""
        return [line for _, line in self._lines]

    def where(self, index: int) -> str:
        """Returns file and line number, for error messages."""
        return f"{self._file}, line {self._lines[index][0]}"


def conversation_of(row: JsonMapping) -> Conversation:
    """Returns the conversation of a line of an SFT file. Raises DatasetError without the line number."""
    if "messages" in row:
        return Conversation(_messages(row, "messages"), _tools(row))
    if "prompt" not in row:
        raise DatasetError(f"neither 'messages' nor 'prompt' ({_keys(row)})")
    answer = "completion" if "completion" in row else "response"
    return _continued(row, answer)


def pair_of(row: JsonMapping) -> PreferencePair:
    """Returns the preference pair of a line of a DPO file. Raises DatasetError without the line number."""
    return PreferencePair(_continued(row, "chosen"), _continued(row, "rejected"))


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
        raise DatasetError(f"{key!r} should be {expected}, but is {_shown(found)}")
    for place, message in enumerate(found):
        _check_message(message, f"{key}[{place}]")
    return found


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise DatasetError(f"{where} should be an object with role and content, but is {_shown(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        hint = did_you_mean(role, ROLES)
        raise DatasetError(f"{where}: unknown role {_shown(role)}; {hint}")
    is_call = content is None and role == "assistant" and message.get("tool_calls")
    if not is_call and not isinstance(content, str | list):
        raise DatasetError(f"{where}: content should be text or a list of parts, but is {_shown(content)}")


def _tools(row: JsonMapping) -> list[JsonObject] | None:
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DatasetError(f"'tools' should be a list of objects, but is {_shown(tools)}")
    return tools or None


def _read_lines(file: Path) -> list[tuple[int, bytes]]:
    """Returns lines with their numbers, without empty lines."""
    if file.suffix == ".parquet":
        example = f"pandas.read_parquet('{file.name}').to_json('{file.stem}.jsonl', orient='records', lines=True)"
        raise DatasetError(f"{file}: conversations must be in a JSONL file; to convert it: {example}")
    try:
        content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DatasetError(f"{file}: cannot be read as a file of conversations ({error.strerror})") from None
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if not lines:
        raise DatasetError(f"{file} is empty; it should hold one JSON object in each line")
    return lines


def _object_of(line: bytes) -> JsonMapping:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DatasetError(f"not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise DatasetError(f"should be a JSON object, but is {_shown(row)}")
    return row


def _keys(row: JsonMapping) -> str:
    return f"it has {_shown(', '.join(row))}" if row else "it is empty"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
