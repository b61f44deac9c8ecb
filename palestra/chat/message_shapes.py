"""Conversations in the shape that a template takes.

Agents send several system messages, system messages among the others, and two messages of the user in a row. Many
templates refuse that, or leave the message out without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra.chat.canonical import Message
from palestra.chat.errors import ChatError

BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class MessageShape:
    """The sequences of messages that a template takes."""

    systems: bool
    """Several system messages at the beginning."""
    later_system: bool
    """A system message among the others."""
    users: bool
    """Two messages of the user in a row."""

    @classmethod
    def of(cls, render: Callable[[Sequence[Message]], str]) -> MessageShape:
        """Tries them out. `render` shows a conversation."""

        def takes(*roles: str) -> bool:
            messages = [{"role": role, "content": f"{role} {at} speaks"} for at, role in enumerate(roles)]
            try:
                text = render(messages)
            except ChatError:
                return False
            return all(one["content"] in text for one in messages)

        return cls(
            systems=takes("system", "system", "user"),
            later_system=takes("user", "assistant", "system", "user"),
            users=takes("user", "user"),
        )

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages in this shape: a system message that has no place is the user's, neighbours are
        joined."""
        begun = next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))
        fitted: list[Message] = []
        for at, message in enumerate(messages):
            role = message["role"]
            if role == "system" and at >= begun and not self.later_system:
                role = "user"
            is_joined = (role == "user" and not self.users) or (role == "system" and at < begun and not self.systems)
            if is_joined and fitted and fitted[-1]["role"] == role:
                joined = BETWEEN.join((fitted[-1]["content"], message["content"]))
                fitted[-1] = {**fitted[-1], "content": joined}
            else:
                fitted.append(message if role == message["role"] else {**message, "role": role})
        return fitted
