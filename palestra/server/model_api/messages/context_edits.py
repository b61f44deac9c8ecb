"""Edits of `context_management`: what a server would take out of a conversation before the model reads it.

Owns: which edits leave a conversation as it is. Never touches: conversations; nothing is ever taken out of one.
"""

from __future__ import annotations

from typing import Any

from palestra.server.core.wire_errors import shown
from palestra.server.model_api.messages.errors import wrong
from palestra.util.json_types import JsonObject

FIELD = "context_management"
THINKING_EDIT = "clear_thinking_20251015"
KEEP_ALL: tuple[Any, ...] = ("all", {"type": "all"})


def check_edits(given: JsonObject | None) -> None:
    """Raises a refusal for an edit that would take something out."""
    if others := sorted((given or {}).keys() - {"edits"}):
        raise wrong(FIELD, f"{shown(others[0])} is not supported; it takes edits alone", code="unsupported")
    edits = (given or {}).get("edits") or []
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise wrong(f"{FIELD}.edits", "it must be a list of edits")
    for i, edit in enumerate(edits):
        where, kind = f"{FIELD}.edits[{i}]", edit.get("type")
        if kind != THINKING_EDIT:
            detail = f"an edit of type {shown(kind)} is not supported; clear or compact the conversation at the client"
            raise wrong(where, detail, code="unsupported")
        if edit.get("keep") not in KEEP_ALL:
            kept = shown(edit["keep"]) if "keep" in edit else "missing"
            detail = f'keep is {kept}; what was sampled stays in the conversation, so send "all"'
            raise wrong(where, detail, code="unsupported")
