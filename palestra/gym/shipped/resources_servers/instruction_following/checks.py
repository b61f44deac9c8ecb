"""Checks of instructions that can be checked: IFEval's, by their ids."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable

from palestra.util.json_types import JsonMapping

Check = Callable[..., bool]

CHECKS: dict[str, Check] = {}

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[A-Z0-9\"'(\[])")
_ABBREVIATIONS = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No)\.$")
RELATIONS = {"less than": lambda found, wanted: found < wanted, "at least": lambda found, wanted: found >= wanted}
CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def check(name: str) -> Callable[[Check], Check]:
    def added(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return added


def follows(name: str, text: str, arguments: JsonMapping) -> bool:
    """Whether the text follows the instruction. Raises KeyError for an unknown id, TypeError for wrong arguments."""
    given = {key: value for key, value in arguments.items() if value is not None}
    return bool(text.strip()) and CHECKS[name](text, **given)


# Words


@check("keywords:existence")
def has_keywords(text: str, keywords: list[str]) -> bool:
    return all(_occurs(word, text) for word in keywords)


@check("keywords:frequency")
def has_keyword_often(text: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return _compared(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), frequency, relation)


@check("keywords:forbidden_words")
def has_no_forbidden(text: str, forbidden_words: list[str]) -> bool:
    return not any(_occurs(word, text, whole=True) for word in forbidden_words)


@check("keywords:letter_frequency")
def has_letter_often(text: str, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return _compared(Counter(text.lower())[letter.lower()], let_frequency, let_relation)


@check("last_word:last_word_answer")
def ends_with_word(text: str, last_word: str) -> bool:
    return _words(text)[-1:] == [last_word.lower()]


@check("first_word:first_word_answer")
def begins_with_word(text: str, first_word: str) -> bool:
    return _words(text)[:1] == [first_word.lower()]


# Lengths


@check("length_constraints:number_words")
def word_count(text: str, num_words: int, relation: str = "at least") -> bool:
    return _compared(len(re.findall(r"\w+", text)), num_words, relation)


@check("length_constraints:number_sentences")
def sentence_count(text: str, num_sentences: int, relation: str = "at least") -> bool:
    return _compared(len(sentences(text)), num_sentences, relation)


@check("length_constraints:number_paragraphs")
def paragraph_count(text: str, num_paragraphs: int) -> bool:
    """Paragraphs are divided by `***`."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1 if not parts[0] else 0 : len(parts) - (not parts[-1])]
    return all(inner) and len(inner) == num_paragraphs


@check("length_constraints:nth_paragraph_first_word")
def nth_paragraph_begins(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are divided by empty lines."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    return _words(paragraphs[nth_paragraph - 1])[:1] == [first_word.lower()]


# Content


@check("detectable_content:number_placeholders")
def placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


@check("detectable_content:postscript")
def has_postscript(text: str, postscript_marker: str = "P.S.") -> bool:
    letters = [re.escape(one) for one in postscript_marker if one.isalnum()]
    return re.search(r"^[ \t]*" + r"\.?\s?".join(letters) + r"\.?.*$", text, re.IGNORECASE | re.MULTILINE) is not None


# Form


@check("detectable_format:number_bullet_lists")
def bullets(text: str, num_bullets: int) -> bool:
    starred = re.findall(r"^[ \t]*\*[^*].*$", text, re.MULTILINE)
    return len(starred) + len(re.findall(r"^[ \t]*-.*$", text, re.MULTILINE)) == num_bullets


@check("detectable_format:constrained_response")
def one_of_choices(text: str) -> bool:
    return any(choice in text for choice in CHOICES)


@check("detectable_format:number_highlighted_sections")
def highlights(text: str, num_highlights: int) -> bool:
    double = re.findall(r"\*\*([^\n*]+)\*\*", text)
    single = re.findall(r"(?<!\*)\*([^\n*]+)\*(?!\*)", text)
    return sum(bool(one.strip()) for one in double + single) >= num_highlights


@check("detectable_format:multiple_sections")
def sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)) - 1 >= num_sections


@check("detectable_format:json_format")
def is_json(text: str) -> bool:
    bare = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(bare)
    except (ValueError, RecursionError):
        return False
    return True


@check("detectable_format:title")
def has_title(text: str) -> bool:
    return any(one.strip("<> ") for line in text.splitlines() for one in line.partition("<<")[2].split(">>")[:-1])


@check("combination:two_responses")
def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    inner = [part for at, part in enumerate(parts) if part or 0 < at < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


@check("combination:repeat_prompt")
def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@check("startend:end_checker")
def ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@check("startend:quotation")
def is_quoted(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare.startswith('"') and bare.endswith('"')


@check("change_case:capital_word_frequency")
def capital_words(text: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    return _compared(sum(word.isupper() for word in re.findall(r"[\w'-]+", text)), capital_frequency, capital_relation)


@check("change_case:english_capital")
def is_upper(text: str) -> bool:
    return text.isupper()


@check("change_case:english_lowercase")
def is_lower(text: str) -> bool:
    return text.islower()


@check("punctuation:no_comma")
def no_comma(text: str) -> bool:
    return "," not in text


def sentences(text: str) -> list[str]:
    """Splits sentences well enough to count them: at ends of sentences that are not abbreviations."""
    found: list[str] = []
    for part in _SENTENCE_END.split(text.strip()):
        if found and _ABBREVIATIONS.search(found[-1]):
            found[-1] += " " + part
        else:
            found.append(part)
    return [part for part in found if part.strip()]


def _compared(found: int, number: int, relation: str) -> bool:
    if relation not in RELATIONS:
        raise TypeError(f"relation {relation!r} is none of {', '.join(RELATIONS)}")
    return RELATIONS[relation](found, number)


def _occurs(word: str, text: str, *, whole: bool = False) -> bool:
    shape = rf"\b{re.escape(word)}\b" if whole else re.escape(word)
    return re.search(shape, text, re.IGNORECASE) is not None


def _words(text: str) -> list[str]:
    return re.findall(r"[\w'-]+", text.lower())
