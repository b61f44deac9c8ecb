"""The process that checks instructions, with lm_eval's copy of IFEval's own checks.

It runs in the Python that has lm_eval, and imports nothing of ours. As a command with `check` it says whether the
checks can run here.
"""

from __future__ import annotations

import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path


def checks() -> object:
    """Imports the checks alone: `lm_eval.tasks` around them would load datasets and more, for seconds."""
    if (found := find_spec("lm_eval")) is None or found.origin is None:
        sys.exit("No module named 'lm_eval'")
    package = types.ModuleType("lm_eval.tasks")
    package.__path__ = [str(Path(found.origin).parent / "tasks")]
    sys.modules["lm_eval.tasks"] = package
    from lm_eval.tasks.ifeval import instructions_util, utils  # pyright: ignore[reportMissingImports]

    try:
        instructions_util.nltk.data.find("tokenizers/punkt_tab")  # without it some checks raise, and others do not
    except LookupError:
        sys.exit(f"its nltk has no punkt_tab; to download it: {sys.executable} -m nltk.downloader punkt_tab")
    return utils


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # output that libraries print is no answer
    utils = checks()
    if sys.argv[1:] == ["check"]:
        print("[]", file=out)
        return
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(_checked(utils, question["row"], question["answer"])), file=out, flush=True)


def _checked(utils: object, row: dict[str, object], answer: str) -> dict[str, object]:
    try:
        return utils.process_results(row, [answer])  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:  # boundary: a check that raises says nothing about the answer
        return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main()
