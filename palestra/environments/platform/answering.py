"""How an episode gives its answer: by a tool that no app has, and that ends the task."""

from __future__ import annotations

from typing import Any

import msgspec

ANSWER_TOOL = "submit_final_answer"


class AnswerTool(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: dict[str, Any]


SUBMIT = AnswerTool(
    ANSWER_TOOL,
    "Give the final answer. This ends the task.",
    {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
)
