from __future__ import annotations


class ChatError(ValueError):
    """A tokenizer or chat template cannot be used, or the template refuses the messages."""


class TooLongError(ChatError):
    """The text has more tokens than allowed; its number of characters proves it, so it was not encoded."""

    def __init__(self, least_tokens: int) -> None:
        super().__init__(f"it has at least {least_tokens} tokens")
        self.least_tokens = least_tokens
