"""The example that learns a sentence by heart, as its readers start it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "overfit.py"


@pytest.mark.slow
def test_it_learns_its_sentence_word_for_word() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "learned word for word; the base model is as it was" in done.stdout
