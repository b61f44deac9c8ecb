"""Detects a stop string at the end of the generated tokens; stop tokens are the scheduler's."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

MAX_CHARACTER_BYTES = 4
REPLACEMENT = "\ufffd"  # what a tokenizer says for bytes that are no character (yet)


def ends_with_stop(tokenizer: Tokenizer, generated: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether the last token has completed one of `stops`: its earlier tokens were asked about before."""
    # A token is at least a byte: so many reach back over the longest stop string, and over what is left of a character
    # they start in. Some tokenizers give up on all bytes next to such a rest, so it is also tried without.
    tail = generated[-max(len(s.encode()) for s in stops) - MAX_CHARACTER_BYTES :]
    for skipped in range(MAX_CHARACTER_BYTES):
        text = tokenizer.decode(tail[skipped:], skip_special_tokens=False)
        if any(s in text for s in stops):
            return True
        if REPLACEMENT not in text:
            return False
    return False
