"""How an episode gives its answer: by a tool that no app has, and that ends the task."""

from __future__ import annotations

import msgspec

from palestra.util.json_types import JsonObject

ANSWER_TOOL = "submit_final_answer"


class AnswerTool(msgspec.Struct, frozen=True):
    name: str
    description: str
    parameters: JsonObject


SUBMIT = AnswerTool(
    ANSWER_TOOL,
    "Give the final answer. This ends the task.",
    {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
)
