"""Verdicts of bfcl_eval's own runner on answers, for tests: it runs in its Python, and imports nothing of ours.

It reads a list of `{"task", "said"}` and prints whether the runner calls each valid. What the runner imports beside the
checker (the SDKs of vendors, tables for reports) is replaced by empty modules.
"""

import json
import os
import sys
import tempfile
from types import ModuleType, SimpleNamespace

MODEL = "palestra"


class _Empty(ModuleType):
    __all__: tuple[str, ...] = ()

    def __getattr__(self, name):
        return SimpleNamespace()


def runner():
    for name in (
        "bfcl_eval.constants.model_config",
        "bfcl_eval.eval_checker.agentic_eval.agentic_checker",
        "bfcl_eval.eval_checker.eval_runner_helper",
        "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker",
        "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils",
        "bfcl_eval.model_handler.base_handler",
        "dotenv",
        "tqdm",
    ):
        sys.modules[name] = _Empty(name)
    entry = SimpleNamespace(underscore_to_dot=False)
    sys.modules["bfcl_eval.constants.model_config"].MODEL_CONFIG_MAPPING = {MODEL: entry}
    from bfcl_eval.eval_checker import eval_runner

    return eval_runner


def verdict(one):
    from bfcl_eval.constants.enums import Language, ReturnFormat
    from bfcl_eval.eval_checker import eval_runner
    from bfcl_eval.model_handler.utils import default_decode_ast_prompting

    task, said = one["task"], one["said"]
    handler = SimpleNamespace(decode_ast=default_decode_ast_prompting)
    entry, category = {"function": task["functions"]}, task["category"]
    if category.endswith("relevance"):
        found = eval_runner._evaluate_single_relevance_entry(handler, task["id"], said, entry, MODEL, category)
        return found["valid"]
    kind = category.rpartition("_")[2]
    kind = kind if kind in ("java", "javascript") else "python"
    try:
        found = eval_runner._evaluate_single_ast_entry(
            *(handler, task["id"], said, task["answers"], entry, MODEL, category),
            language=Language(kind),
            return_format=ReturnFormat(kind),
        )
    except Exception:  # the runner itself ends there
        return False
    return found["valid"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BFCL_PROJECT_ROOT"] = folder
        runner()
        print(json.dumps([verdict(one) for one in json.load(sys.stdin)]))
