"""Small task folders for tests."""

from __future__ import annotations

from pathlib import Path

TEST_SH = """#!/bin/bash
if [ "$(cat answer.txt)" = "$(cat /tests/expected.txt)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def harbor(folder: Path, **changed: str) -> Path:
    """A task in Harbor's format: write 42 into answer.txt. A file that is changed to nothing is not there."""
    files = {
        "task.toml": (
            '[metadata]\ndifficulty = "easy"\ntags = ["a"]\n[agent]\ntimeout_sec = 30\n[verifier]\ntimeout_sec = 20\n'
        ),
        "instruction.md": "Write the answer into answer.txt.\n",
        "environment/Dockerfile": (
            "FROM ubuntu\n# words\nWORKDIR /app\nCOPY src/ .\nRUN mkdir -p out && \\\n  echo made > out/made.txt\n"
        ),
        "environment/src/question.txt": "6 * 7\n",
        "tests/test.sh": TEST_SH,
        "tests/expected.txt": "42\n",
        "solution/solve.sh": "echo 42 > answer.txt\n",
    }
    return write(folder, {name: text for name, text in {**files, **changed}.items() if text})


def terminal_bench(folder: Path, **changed: str) -> Path:
    """The same in Terminal-Bench's first format."""
    files = {
        "task.yaml": "instruction: Write the answer into answer.txt.\ndifficulty: easy\nmax_agent_timeout_sec: 30\n",
        "Dockerfile": "FROM base\nWORKDIR /app\nCOPY . .\n",
        "docker-compose.yaml": "services:\n  client:\n    build: {dockerfile: Dockerfile}\n",
        "question.txt": "6 * 7\n",
        "run-tests.sh": 'sh "$TEST_DIR/summary.sh"\n',
        "tests/summary.sh": (
            "echo '=== short test summary info ==='\n"
            'if [ "$(cat answer.txt)" = 42 ]; then echo PASSED a::b; else echo FAILED a::b - no; fi\n'
        ),
        "solution.sh": "echo 42 > answer.txt\n",
    }
    return write(folder, {name: text for name, text in {**files, **changed}.items() if text})


def cases(folder: Path, transcript: str, settings: str = "", **files: str) -> Path:
    """A task whose verifier is a transcript."""
    own = {"task.toml": settings or "[metadata]\n", "instruction.md": "Do it.\n", "tests/cases.txt": transcript}
    return write(folder, {**own, **files})
