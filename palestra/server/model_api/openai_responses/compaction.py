"""Compaction of a conversation: the model summarizes it, and the client goes on from the summary.

A request whose input ends with a trigger is answered with one item that stands for all that was said. OpenAI encrypts
it; here it holds the model's own summary in clear, and is shown to the model as a message of the user's.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.chat.responses_input import Item
from palestra.chat.responses_output import new_id
from palestra.server.model_api.errors import invalid
from palestra.types.openai import ResponseItem

TRIGGER, COMPACTION = "compaction_trigger", "compaction"
CLEAR = "palestra-summary:"
"""Begins what is in place of the encrypted content."""
REQUEST = (
    "Your context is nearly full. Write a summary of this conversation, from which alone you will go on: what the user "
    "wants, what was done and found out, which files and commands matter, what is left to do, and the next step. "
    "Answer with the summary only, and call no tools."
)
SUMMARY = "The conversation up to here was long. This is your own summary of it:\n\n"


def is_compaction(items: str | Sequence[Item]) -> bool:
    return not isinstance(items, str) and bool(items) and items[-1].get("type") == TRIGGER


def as_messages(items: str | Sequence[Item]) -> str | Sequence[Item]:
    """Returns the input with the trigger and earlier summaries as messages."""
    return items if isinstance(items, str) else [_as_message(item, f"input[{i}]") for i, item in enumerate(items)]


def _as_message(item: Item, where: str) -> Item:
    match item:
        case {"type": "compaction_trigger"}:
            return {"role": "user", "content": REQUEST}
        case {"type": "compaction", "encrypted_content": str(content)} if content.startswith(CLEAR):
            return {"role": "user", "content": SUMMARY + content.removeprefix(CLEAR)}
        case {"type": "compaction"}:
            detail = "a conversation that was compacted elsewhere cannot be read; begin a new one"
            raise invalid(where, f"{where}: {detail}", code="unsupported")
        case _:
            return item


def compaction_item(summary: str) -> ResponseItem:
    return {"id": new_id("cmp"), "type": COMPACTION, "encrypted_content": CLEAR + summary}
