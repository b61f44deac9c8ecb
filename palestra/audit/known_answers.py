"""The right answers of tasks, as far as their rows have them, and whether the policy could read one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set

from palestra.types.rollouts import Task

ANSWER_KEYS = frozenset(
    {
        *("answer", "answers", "expected", "expected_answer", "final_answer", "gold", "gold_answer", "golden_answer"),
        *("ground_truth", "label", "secret", "number", "solution", "target", "target_answer", "correct_answer"),
        *("oracle_answer", "reference", "reference_answer"),
    }
)
GRADERS_KEYS = ANSWER_KEYS - {"answer", "answers", "final_answer", "number", "secret", "label"}
"""Those under which a verdict has the right answer: `answer` may be what was said there."""
DEPTH = 3  # of mappings in a row
LONGEST = 2_000  # characters of an answer
LABEL = (
    r"(?:answer|expected|correct|solution|target|ground[ _]truth|label|secret|gold|reference)\w*"
    r"(?:\s+(?:answer|value|result|one|number|is|was|should|be|would|have|been))*"
    r"[\"'`\s:=\->(\[]{1,12}"
)
CHOICE = r"[\"'`)\]]*\s*(?:or\b|/|\||,\s*\S+\s+or\b)"
"""What follows an answer that is one of several to choose from: `Answer 'Yes' or 'No'`."""
FORMS = (
    "{}",
    "Answer: {}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "<think></think><answer>{}</answer>",
    "#### {}",
    "{} <done>",
    "[{}]",
    "\\boxed{{{}}} <done>",
)
"""Ways in which environments ask for an answer."""


def answers_of(task: Task) -> list[str]:
    """Returns the texts under keys such as `answer`, in the task's extras."""
    return _texts(task.extras, ANSWER_KEYS)


def answers_of_verdict(verdict: Mapping[str, object]) -> list[str]:
    """Returns the right answers that an environment names in its verdict on an episode, such as `expected`."""
    return _texts(verdict, GRADERS_KEYS)


def _texts(row: Mapping[str, object], keys: Set[str]) -> list[str]:
    found = dict.fromkeys(one for one in _values(row, keys, DEPTH) if one.strip() and len(one) <= LONGEST)
    return list(found)


def _values(row: Mapping[str, object], keys: Set[str], depth: int) -> Iterator[str]:
    for key, value in row.items():
        if isinstance(value, Mapping) and depth:
            yield from _values(value, keys, depth - 1)
        elif str(key).lower() in keys:
            yield from (_plain(one) for one in (value if isinstance(value, list) else [value]) if _is_plain(one))


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _plain(value: object) -> str:
    return str(value).rpartition("####")[2].strip()


def said_as(form: str, answer: str) -> str:
    return form.format(answer)


def is_labelled(answer: str, text: str) -> bool:
    """Whether the text says of this answer that it is one: `expected: 42`."""
    return re.search(rf"{LABEL}{re.escape(answer)}(?!\w|[.,]\d|{CHOICE})", text, re.IGNORECASE) is not None


def stands_in(answer: str, text: str) -> bool:
    """Whether the answer stands in the text, as whole words."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def share_of_own(answers: Mapping[str, Sequence[str]], texts: Mapping[str, str]) -> tuple[float, float]:
    """Returns the share of tasks in whose text their own answer stands, and the share of all pairs of tasks where
    another one's does. Both are by the tasks' ids."""
    own = [any(stands_in(one, texts[task]) for one in answers[task]) for task in texts]
    pairs = [(task, other) for task in texts for other in texts if task != other]
    others = [any(stands_in(one, texts[task]) for one in answers[other]) for task, other in pairs]
    return sum(own) / max(1, len(own)), sum(others) / max(1, len(others))
