"""Questions with known answers, from any file: one turn, graded by comparing."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any

from palestra.chat.tool_calls import without_thinking
from palestra.environments.answer_text import after_label, last_boxed, last_number, unwrapped
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput
from palestra.types.rollouts import Task
from palestra.util.json_types import JsonObject, JsonPayload

GSM8K_MARK = "####"
AROUND = " \t\r\n.,;:!?\"'`*_"


class AnswerMatch(StrEnum):
    NUMBER = "number"
    """The last number is the answer."""
    TEXT = "text"
    """The final answer is this text, whatever its case and the punctuation around it."""
    CONTAINS = "contains"
    """The text occurs somewhere, as whole words."""


class Answers(BaseTextEnv):
    r"""A single turn: the reward is 1 if the final answer is the task's `answer`, or one of a list, else 0.

    The final answer is in the last `\boxed{}`, after the last `Answer:` or `####`, or else all that was said after
    thinking. How it is compared is the task's `match`, or `match` in the config, or goes by the answer: number or text.
    """

    reward_range = (0.0, 1.0)

    def __init__(self, env_config: Any = None, extras: JsonObject | None = None) -> None:
        super().__init__(env_config, extras)
        given = self.extras.get("answer")
        accepted = given if isinstance(given, list) else [given]
        if not accepted or not all(isinstance(one, str | int | float) and str(one).strip() for one in accepted):
            raise ValueError("answers: a task needs an 'answer' (text, a number, or a list of them) in its extras")
        self._accepted = [str(one).rpartition(GSM8K_MARK)[2].strip() for one in accepted]
        match = self.extras.get("match") or (env_config.get("match") if env_config else None)
        try:
            self._match = None if match is None else AnswerMatch(match)
        except ValueError:
            raise ValueError(f"answers: unknown match {match!r}; there are: {', '.join(AnswerMatch)}") from None
        self._final = ""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self.turns:
            raise RuntimeError("answers: the episode is over after one step")
        self.turns += 1
        reply = without_thinking(action)
        self._final = final_answer(reply)
        is_right = any(self._is_right(reply, accepted) for accepted in self._accepted)
        metadata = {"said": self._final}
        return BaseTextEnvStepOutput(observations=[], reward=float(is_right), done=True, metadata=metadata)

    @staticmethod
    def gold(task: Task) -> str:
        given = task.extras["answer"]
        first = given[0] if isinstance(given, list) else given
        return f"Answer: {str(first).rpartition(GSM8K_MARK)[2].strip()}"

    def get_metrics(self) -> JsonPayload:
        return {"parse_error": 0.0 if self._final else 1.0}

    def _is_right(self, reply: str, accepted: str) -> bool:
        number = _number(accepted)
        match self._match or (AnswerMatch.TEXT if number is None else AnswerMatch.NUMBER):
            case AnswerMatch.NUMBER:
                found = last_number(self._final)
                return number is not None and found is not None and _number(found) == number
            case AnswerMatch.TEXT:
                return _plain(self._final) == _plain(accepted)
            case AnswerMatch.CONTAINS:
                return re.search(rf"(?<!\w){re.escape(accepted.casefold())}(?!\w)", reply.casefold()) is not None


def final_answer(reply: str) -> str:
    found = last_boxed(reply)
    if found is None and GSM8K_MARK in reply:
        found = reply.rpartition(GSM8K_MARK)[2]
    if found is None:
        found = after_label(reply)
    return unwrapped(reply if found is None else found)


def _number(text: str) -> Decimal | None:
    try:
        found = Decimal(text.replace(",", "").strip())
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def _plain(text: str) -> str:
    return " ".join(text.strip(AROUND).casefold().split())
