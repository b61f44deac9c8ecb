"""The process that has the Berkeley function-calling leaderboard: its tasks, their prompts, and its own checker.

It runs in the Python that has bfcl_eval, and imports nothing of ours. As a command with `tasks CATEGORY…` it prints
the tasks.

The package's decoder evaluates sums that a model has written (`f(a=3 + 4)`) as Python, whatever they are; here they are
arithmetic or no call. The package's table of models imports the SDKs of twenty vendors, of which the checker wants one
flag; a table with one entry stands in, so that the package is installed without them.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import resource
import sys
import tempfile
import types
from typing import Any

MODEL = "palestra"
MEMORY_BYTES = 4 * 1024**3
RELEVANCE = ("irrelevance", "relevance")


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # output that libraries print is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.modules["bfcl_eval.constants.model_config"] = _one_model()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BFCL_PROJECT_ROOT"] = folder  # where the package makes folders as soon as it is imported
        if sys.argv[1:2] == ["tasks"]:
            print(json.dumps([task for category in sys.argv[2:] for task in _tasks(category)]), file=out)
            return
        _tools()
        print("{}", file=out, flush=True)
        for line in sys.stdin:
            question = json.loads(line)
            print(json.dumps(_checked(question["task"], question["answer"])), file=out, flush=True)


def _one_model() -> types.ModuleType:
    module: Any = types.ModuleType("bfcl_eval.constants.model_config")
    module.MODEL_CONFIG_MAPPING = {MODEL: types.SimpleNamespace(underscore_to_dot=False)}
    return module


def _tools() -> Any:
    from bfcl_eval import utils  # pyright: ignore[reportMissingImports]
    from bfcl_eval.constants import enums  # pyright: ignore[reportMissingImports]
    from bfcl_eval.eval_checker.ast_eval import ast_checker  # pyright: ignore[reportMissingImports]
    from bfcl_eval.model_handler import utils as handler  # pyright: ignore[reportMissingImports]

    handler.eval = arithmetic
    return types.SimpleNamespace(utils=utils, enums=enums, checker=ast_checker, handler=handler)


OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def arithmetic(text: str) -> Any:
    """Evaluates numbers, texts and operators, and nothing that could do anything. Raises ValueError."""
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.UnaryOp | ast.BinOp) and type(node.op) in OPERATORS:
        sides = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        return OPERATORS[type(node.op)](*map(_value, sides))
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")


def _tasks(category: str) -> list[dict[str, object]]:
    tools = _tools()
    entries = tools.utils.load_dataset_entry(category)
    has_answers = not category.endswith(RELEVANCE)
    answers = tools.utils.load_ground_truth_entry(category) if has_answers else [{}] * len(entries)
    return [
        {
            "id": entry["id"],
            "category": category,
            "prompt": tools.handler.system_prompt_pre_processing_chat_model(
                entry["question"][0], entry["function"], entry["id"]
            ),
            "functions": entry["function"],
            "answers": answer.get("ground_truth"),
        }
        for entry, answer in zip(entries, answers, strict=True)
    ]


def _checked(task: dict[str, Any], answer: str) -> dict[str, object]:
    tools, category = _tools(), task["category"]
    kind = next((one for one in ("java", "javascript") if category.endswith(f"_{one}")), "python")
    try:
        calls = tools.handler.default_decode_ast_prompting(answer, tools.enums.ReturnFormat(kind), False)
    except Exception as error:  # boundary: an answer that is no call, which is right where none is wanted
        why = f"Invalid syntax. Failed to decode AST. {error}"
        return {"valid": category.endswith("irrelevance"), "error": why[:500]}
    if category.endswith(RELEVANCE):
        return {"valid": tools.utils.is_empty_output(calls) == category.endswith("irrelevance"), "error": None}
    if not tools.utils.is_function_calling_format_output(calls):
        return {"valid": False, "error": "Did not output in the specified format."}
    try:
        found = tools.checker.ast_checker(
            task["functions"], calls, task["answers"], tools.enums.Language(kind), category, MODEL
        )
    except Exception as error:  # boundary: the checker raises for calls that it did not expect
        return {"valid": False, "error": f"the checker raised {type(error).__name__}: {error}"[:500]}
    return {"valid": bool(found["valid"]), "error": str(found.get("error") or "")[:500] or None}


if __name__ == "__main__":
    main()
