"""Messages that no environment asks for, and that a model may send all the same."""

from __future__ import annotations

LONG = 200_000  # characters: more than a model says in a turn, less than what takes seconds to read

MALFORMED = {
    "empty call": "<tool_call></tool_call>",
    "call without a name": '<tool_call>{"arguments": {}}</tool_call>',
    "call of an unknown tool": '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
    "call whose name is a list": '<tool_call>{"name": ["count"], "arguments": {}}</tool_call>',
    "call whose arguments are text": '<tool_call>{"name": "no_such_tool", "arguments": "x"}</tool_call>',
    "cut JSON": '<tool_call>{"name": "no_such_tool", "arguments": {"a": ',
    "deep JSON": '<tool_call>{"name": "a", "arguments": ' + "[" * 5_000 + "]" * 5_000 + "}</tool_call>",
    "many calls": '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>' * 200,
    "open tags": "<tool_call>" * 2_000,
    "thinking without an end": "<think>I have to think about it",
    "empty box": "\\boxed{} <answer></answer> Answer:",
    "open box": "\\boxed{" * 500,
    "huge number": "9" * 5_000,
    "huge exponent": "1e999999999",
    "not a number": "NaN",
    "infinity": "Infinity",
    "odd digits": "²½٣",
    "control characters": "\x00\x1b[2J\x7f",
    "lone surrogate": "\ud800",
    "format fields": "{0} {x!r} %s %(y)d ${z}",
    "expression": "__import__('os').getcwd()",
    "fraction of zero": "1/0",
    "long text": "word " * (LONG // 5),
    "long line": "a" * LONG,
    "long row of brackets": "(" * 5_000,
    "empty code": "```python\n```",
    "code that exits": "```python\nimport sys\nsys.exit(0)\n```",
    "JSON null": "null",
    "JSON list": "[1, [2, {}]]",
    "only spaces": " \n\t ",
}
