"""Multiple choice: finds the letter of an answer, as strictly as the row requires."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

from palestra.environments.answer_text import after_label, last_boxed, unwrapped
from palestra.environments.grading.grader_processes import ChildError, GraderProcesses
from palestra.gym.metrics import highest_k, pass_metrics
from palestra.gym.records import ServerInstance
from palestra.gym.servers.base import Peers
from palestra.gym.servers.resources import ResourcesServer, ResourcesSettings, ReverifyMode
from palestra.gym.servers.responses import output_text
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

CHILD = "palestra.gym.grading.pattern_child"
Options = list[dict[str, str | None]]


class GradingMode(StrEnum):
    STRICT_BOXED = "strict_single_letter_boxed"
    LENIENT_BOXED = "lenient_boxed"
    """The text of an option in the box counts, too."""
    ANSWER_COLON = "lenient_answer_colon"
    ANSWER_COLON_MD = "lenient_answer_colon_md"


class McqaSettings(ResourcesSettings, frozen=True, kw_only=True):
    grading_mode: GradingMode | None = None
    """Takes precedence over the mode in rows."""
    regex_timeout_seconds: float = 5.0
    """Time limit for the patterns of a row."""


_ALONE = re.compile(r"^[^A-Za-z]*([A-Za-z])[^A-Za-z]*$")
_LABELLED = re.compile(r"^\W*([A-Za-z])\s*[:).\-]")
_LEADING = re.compile(r"^\W*([A-Za-z])(?![A-Za-z])")
_SEVERAL = re.compile(r"\b([A-Za-z])\b\s*(?:[/|&,;]|\bor\b|\band\b)\s*\b([A-Za-z])\b", re.IGNORECASE)


class Mcqa(ResourcesServer[McqaSettings]):
    reverify_mode = ReverifyMode.STATELESS

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        self._children = GraderProcesses(CHILD)

    async def close(self) -> None:
        await self._children.close()
        await super().close()

    async def verify(
        self,
        response: JsonObject,
        expected_answer: str,
        options: Options | None = None,
        grading_mode: GradingMode = GradingMode.STRICT_BOXED,
        template_metadata: JsonObject | None = None,
    ) -> JsonMapping:
        text = output_text(response)
        patterns = (template_metadata or {}).get("output_regex")
        problem: dict[str, str] = {}
        if patterns:
            try:
                letter = by_match(await self._matches(patterns, text), options or [])
            except ChildError as error:  # a pattern may take for ever on what a model wrote: that counts as no answer
                letter, problem = None, {"regex_error": str(error)}
        else:
            letter = letter_of(text, self.settings.grading_mode or grading_mode, options or [])
        return {"reward": float(letter == expected_answer.strip().upper()), "extracted_answer": letter, **problem}

    async def _matches(self, patterns: str | list[str], text: str) -> Sequence[str | None]:
        """Returns the last match of each pattern."""
        question = {"text": text, "patterns": [patterns] if isinstance(patterns, str) else patterns}
        return await self._children.request(question, self.settings.regex_timeout_seconds)

    def compute_metrics(self, tasks: list[list[JsonMapping]]) -> JsonPayload:
        return pass_metrics(tasks, answer_key="extracted_answer")

    def key_metrics(self, metrics: JsonObject) -> JsonPayload:
        tokens = {name: metrics[name] for name in ("mean/input_tokens", "mean/output_tokens") if name in metrics}
        kinds = ("pass@1[avg-of-{k}]", "pass@{k}", "majority@{k}")
        return tokens | {name: value for kind in kinds for name, value in highest_k(metrics, kind).items()}


def letter_of(text: str, mode: GradingMode, options: Options) -> str | None:
    """Returns the chosen option; None: none of them, or more than one."""
    allowed = letters(options)
    if mode in (GradingMode.ANSWER_COLON, GradingMode.ANSWER_COLON_MD):
        answer = after_label(text)
        return _letter(answer, allowed, _LEADING) if answer and not _SEVERAL.search(answer) else None
    box = last_boxed(text)
    if box is None:
        return None
    inside = unwrapped(box)
    found = _letter(inside, allowed, _ALONE) or _letter(inside, allowed, _LABELLED)
    if found is None and mode is GradingMode.LENIENT_BOXED:
        return by_text(inside, options)
    return found


def by_text(answer: str, options: Options) -> str | None:
    """Returns the only option whose text occurs in the answer."""
    words = _plain(answer)
    found = {
        letter.upper()
        for one in options
        for letter, text in one.items()
        if text and _plain(text) and _plain(text) in words
    }
    return found.pop() if len(found) == 1 else None


def by_match(matches: Sequence[str | None], options: Options) -> str | None:
    """Returns the letter, or the option's text, in the first match that has one."""
    for match in matches:
        answer = (match or "").strip()
        if len(answer) == 1 and answer.isalpha():
            return answer.upper()
        exact = {
            letter.upper() for one in options for letter, own in one.items() if own and _plain(own) == _plain(answer)
        }
        if answer and len(exact) == 1:
            return exact.pop()
    return None


def letters(options: Options) -> set[str]:
    """Returns the letters of the options; the whole alphabet if a row names no options."""
    found = {letter.upper() for one in options for letter in one if len(letter) == 1}
    return found or {chr(code) for code in range(ord("A"), ord("Z") + 1)}


def _letter(text: str, allowed: set[str], shape: re.Pattern[str]) -> str | None:
    match = shape.match(text)
    letter = match[1].upper() if match else None
    return letter if letter in allowed else None


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
