from __future__ import annotations


class ChatError(ValueError):
    """A tokenizer or chat template that cannot be used, or messages that its template refuses."""


class TooLongError(ChatError):
    """More than the tokens that were allowed, as its characters alone tell: it was not encoded."""

    def __init__(self, least_tokens: int) -> None:
        super().__init__(f"it has at least {least_tokens} tokens")
        self.least_tokens = least_tokens
