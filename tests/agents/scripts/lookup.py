"""The one tool that every framework here is given."""

import os

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look an item up.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


def lookup(item: str) -> str:
    """Look an item up.

    Args:
        item: Its name.
    """
    return os.environ["FOUND"]
