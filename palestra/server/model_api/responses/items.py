"""Converts the `input` of a request to messages of our chat API; refusals name their place in the request.

Owns: where each message came from. Never touches: the conversion itself (`palestra.chat.responses_input`), what a
message may contain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from palestra.chat.responses_input import ChatDialect, ItemError, Place, PlacedMessage, chat_messages
from palestra.server.model_api.errors import invalid
from palestra.util.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class MessageOrigins:
    """Messages, and the place in the request from which each came."""

    messages: list[JsonObject]
    places: list[str]


def read_input(
    given: str | Sequence[JsonObject], instructions: str | None, history: Sequence[JsonObject] = ()
) -> MessageOrigins:
    """`history`: messages before the input."""
    before = [PlacedMessage(message, ("previous_response_id",)) for message in history]
    with with_places():
        found = chat_messages(given, instructions, ChatDialect.OURS, before=before)
    return MessageOrigins([one.message for one in found], [_written(one.place) for one in found])


@contextmanager
def with_places() -> Iterator[None]:
    """Turns an item that cannot be expressed in a chat into a refusal."""
    try:
        yield
    except ItemError as error:
        place = _written(error.place)
        raise invalid(place, f"{place}: {error}", code="unsupported" if error.is_unsupported else None) from None


def _written(place: Place) -> str:
    """Formats a place, e.g. `input[3].content[0]`."""
    return "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place).removeprefix(".")
