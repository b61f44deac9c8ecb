"""The process that compares mathematical expressions: sympy may never finish, so it runs in a child process."""

from __future__ import annotations

import json
import logging
import resource
import sys

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

MEMORY_BYTES = 2 * 1024**3


def main() -> None:
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    out = sys.stdout
    sys.stdout = sys.stderr  # output that libraries print is not an answer
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(_compared(**question)), file=out, flush=True)


def _compared(expected: str, answer: str, latex_first: bool = False) -> dict[str, object]:
    """`latex_first` is math-verify's own order of what is looked for; the other one suits short answers."""
    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    try:
        gold = parse(f"\\boxed{{{expected}}}", [LatexExtractionConfig()], parsing_timeout=0)
        found = parse(answer, kinds if latex_first else kinds[::-1], parsing_timeout=0)
        is_right = bool(gold) and verify(gold, found, timeout_seconds=None)
        return {"is_right": is_right, "extracted": str(found[0]) if found else None}
    except Exception as error:  # boundary: an answer that cannot be parsed is wrong
        return {"is_right": False, "extracted": None, "error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main()
