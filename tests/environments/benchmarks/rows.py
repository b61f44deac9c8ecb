"""Rows in the form of each benchmark's files, and an answer graded.

All rows are written for the tests, in the fields of the published files; none is copied.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.environments.benchmarks.base import BenchmarkEnv

GSM8K = [
    {"question": "A box has 3 rows of 6 eggs. How many eggs are in it?", "answer": "3*6=<<3*6=18>>18 eggs\n#### 18"},
    {
        "question": "Tickets sell for $1 each, 1250 of them. What is earned?",
        "answer": "It is 1250 dollars.\n#### 1,250",
    },
    {"question": "It is 4 degrees and falls by 7. What is it then?", "answer": "4-7=<<4-7=-3>>-3\n#### -3"},
]
MATH500 = [
    {
        "problem": f"Problem {place}.",
        "solution": f"We find $\\boxed{{{answer}}}$.",
        "answer": answer,
        "subject": "Algebra",
        "level": 1 + place % 5,
        "unique_id": f"test/algebra/{place}.json",
    }
    for place, answer in enumerate(["\\frac{1}{2}", "2\\sqrt{3}", "(1,2)", "[2,5)", "x^2+1", "\\text{Evelyn}", "7"])
]
AIME = [
    {"ID": "2024-I-1", "Problem": "Find it.", "Solution": "It is 70.", "Answer": 70},
    {"ID": "2024-I-2", "Problem": "Find that.", "Solution": "It is 5.", "Answer": 5},
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/900",
        "prompt": "from typing import List\n\n\ndef doubled(values: List[int]) -> List[int]:\n"
        '    """Double each value.\n    >>> doubled([1, 2])\n    [2, 4]\n    """\n',
        "entry_point": "doubled",
        "canonical_solution": "    return [2 * value for value in values]\n",
        "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n"
        "    assert candidate([]) == []\n    assert candidate([-5]) == [-10], 'negative'\n",
    },
    {
        "task_id": "HumanEval/901",
        "prompt": "def shifted(text: str) -> str:\n"
        '    """Move each letter by one."""\n'
        "    return ''.join(chr(ord(one) + 1) for one in text)\n\n\n"
        "def unshifted(text: str) -> str:\n"
        '    """Undo shifted."""\n',
        "entry_point": "unshifted",
        "canonical_solution": "    return ''.join(chr(ord(one) - 1) for one in text)\n",
        "test": "def check(candidate):\n    for text in ('abc', '', 'hello'):\n"
        "        assert candidate(shifted(text)) == text\n",
    },
    {
        "task_id": "HumanEval/902",
        "prompt": 'def halves(value):\n    """The halves of a value as a tuple, a set and a generator."""\n',
        "entry_point": "halves",
        "canonical_solution": "    half = value / 2\n    return (half, half), {half}, (half for _ in range(2))\n",
        "test": "def check(candidate):\n    pair, kinds, each = candidate(3)\n    assert pair == (1.5, 1.5)\n"
        "    assert kinds == {1.5}\n    assert list(each) == [1.5, 1.5]\n",
    },
]
MBPP = [
    {
        "task_id": number,
        "text": f"Write a function to add {number} to a value.",
        "code": f"def add_it(value):\r\n  return value + {number}",
        "test_list": [f"assert add_it({value}) == {value + number}" for value in (1, 0, -7)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    for number in (2, 3, 4, 11, 12, 600)
]
MBPP[3] |= {
    "text": "Write a function to find the area of a circle, and one for its outline.",
    "code": "import math\ndef area(r):\n    return math.pi * r * r\ndef outline(r):\n    return 2 * math.pi * r",
    "test_list": ["assert math.isclose(area(1), math.pi)", "assert round(outline(2), 3) == 12.566"],
    "test_setup_code": "import math",
}
IFEVAL = [
    {
        "key": 1,
        "prompt": "Tell me about the sea. Use no commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    },
    {
        "key": 2,
        "prompt": "Name two rivers in at least 8 words, with exactly 2 bullets (* point), and mention water.",
        "instruction_id_list": [
            "length_constraints:number_words",
            "detectable_format:number_bullet_lists",
            "keywords:existence",
        ],
        "kwargs": [
            {"relation": "at least", "num_words": 8, "num_bullets": None},
            {"num_bullets": 2, "keywords": None},
            {"keywords": ["water"]},
        ],
    },
    {
        "key": 3,
        "prompt": "Answer in JSON, in English and in small letters.",
        "instruction_id_list": ["detectable_format:json_format", "change_case:english_lowercase"],
        "kwargs": [{}, {}],
    },
    {
        "key": 4,
        "prompt": "Write less than 3 sentences, with two words in capitals, in quotation marks.",
        "instruction_id_list": [
            "length_constraints:number_sentences",
            "change_case:capital_word_frequency",
            "startend:quotation",
        ],
        "kwargs": [
            {"relation": "less than", "num_sentences": 3},
            {"capital_relation": "at least", "capital_frequency": 2},
            {},
        ],
    },
]


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def tasks_of(env_class: type[BenchmarkEnv], file: Path, **config: Any) -> list[dict[str, Any]]:
    return env_class.tasks("eval", {"data": str(file), **config})


def graded(env_class: type[BenchmarkEnv], answers: Sequence[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    """Returns `reward` and the verdict of each answer to a task, as an evaluation grades them: all in one loop."""

    async def one(task: dict[str, Any], said: str) -> dict[str, Any]:
        env = env_class(None, {name: value for name, value in task.items() if name not in ("id", "prompt")})
        result = await env.step_async(said)
        return {"reward": result["reward"], **env.get_verdict()}

    async def all_of_them() -> list[dict[str, Any]]:
        return await asyncio.gather(*(one(task, said) for task, said in answers))

    return asyncio.run(all_of_them())
