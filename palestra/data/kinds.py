"""Kinds of datasets, told by their rows: prompts to play, conversations to learn, pairs to prefer."""

from __future__ import annotations

from enum import StrEnum

from palestra.data.conversations import SHAREGPT_HINT
from palestra.data.errors import DatasetError
from palestra.util.json_types import JsonMapping


class DataKind(StrEnum):
    PROMPTS = "prompts"
    """Tasks of an environment, for GRPO and evaluation."""
    CHATS = "chats"
    """Conversations, for SFT."""
    PREFERENCES = "preferences"
    """Pairs of answers, for DPO."""


def kind_of(row: JsonMapping) -> DataKind:
    """Raises DatasetError, without a place."""
    if "chosen" in row or "rejected" in row:
        return DataKind.PREFERENCES
    if "messages" in row or ("prompt" in row and ("completion" in row or "response" in row)):
        return DataKind.CHATS
    if "prompt" in row:
        return DataKind.PROMPTS
    hint = SHAREGPT_HINT if "conversations" in row else "; a row needs prompt, messages, or prompt, chosen and rejected"
    if "responses_create_params" in row:
        hint = "; it is a row for a gym, whose servers check it: palestra gym collect"
    raise DatasetError(f"unknown form (it has {', '.join(map(repr, row)) or 'nothing'}){hint}")
