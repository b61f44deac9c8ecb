"""Whether a teacher reads the same tokens as the student: log-probabilities of other tokens would mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from palestra.chat import ChatTokenizer
from palestra.chat.tokenizer_files import read_vocabulary
from palestra.endpoints.model_folders import SetupError
from palestra.rollouts.policy_sampler import SamplingError
from palestra.training.teacher_endpoint import EndpointTeacher

PROBE = (
    "Palestra: 3 + 14 = 17? Yes, since (10 + 7) - 0.5 * 0 is 17;\n\tdef area(r): return 3.14159 * r**2  # naïve, "
    "«quoted», 北京 and Ω\nThe warehouse counted twenty-six boxes, of which several were empty. [1, 2]"
)
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""Part of a token's text if the token is only a part of a character."""


def check_vocabulary(where: str, folder: Path, student: ChatTokenizer) -> None:
    """Raises SetupError unless every token of the student has the same id in the tokenizer of `folder`."""
    teacher = read_vocabulary(folder)
    if (first := _first_difference(student.vocabulary, teacher)) is not None:
        raise SetupError(_refusal(where, first, student.token_name(first), _name(teacher, first)))


async def check_by_scores(where: str, teacher: EndpointTeacher, student: ChatTokenizer) -> None:
    """Lets the endpoint score a text and compares the tokens that it names with the student's. Raises SetupError, also
    if the endpoint cannot score."""
    tokens = student.encode_text(PROBE)
    try:
        scored = await teacher.read(tokens)
    except SamplingError as error:
        raise SetupError(f"{where}: {error}") from None
    for token, one in zip(tokens[1:], scored, strict=True):
        own = student.decode([token], skip_special=False)
        if one.text is not None and UNREADABLE not in one.text + own and one.text.strip() != own.strip():
            raise SetupError(_refusal(where, token, own, one.text))


def _refusal(where: str, token: int, own: str, other: str) -> str:
    return (
        f"{where}: its tokenizer is not the student's (token {token} is {other!r} there and {own!r} here); "
        "a teacher must have the student's tokenizer"
    )


def _first_difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> int | None:
    return min((token for text, token in student.items() if teacher.get(text) != token), default=None)


def _name(vocabulary: Mapping[str, int], token: int) -> str:
    return next((text for text, number in vocabulary.items() if number == token), "")
