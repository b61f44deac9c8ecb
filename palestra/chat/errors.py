from __future__ import annotations


class ChatError(ValueError):
    """A tokenizer or chat template that cannot be used, or messages that its template refuses."""
