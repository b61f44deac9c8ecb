"""Prompts as large as agents send them: sixty tools, forty thousand tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.agents.conftest import PuppetServer

pytestmark = [pytest.mark.agents, pytest.mark.timeout(300)]

TOOLS = 60
LEAST = 40_000


def schema(number: int) -> dict[str, Any]:
    named = {f"argument_{i}": {"type": "string", "description": f"what to do with part {i}"} for i in range(6)}
    return {"type": "object", "properties": named, "required": [f"argument_{number % 6}"]}


FUNCTIONS = [{"name": f"tool_{i}", "description": f"Tool {i} does this. " * 12} for i in range(TOOLS)]
QUESTION = "Please answer. " + "Many words were said before that. " * 2200
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": QUESTION}],
            "tools": [
                {"type": "function", "function": {**f, "parameters": schema(i)}} for i, f in enumerate(FUNCTIONS)
            ],
        },
    ),
    "responses": (
        "responses",
        {
            "input": QUESTION,
            "tools": [{"type": "function", **f, "parameters": schema(i)} for i, f in enumerate(FUNCTIONS)],
        },
    ),
    "messages": (
        "messages",
        {
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 32_000,
            "tools": [{**f, "input_schema": schema(i)} for i, f in enumerate(FUNCTIONS)],
        },
    ),
}


@pytest.mark.parametrize("route", CALLS)
def test_many_tools_and_a_long_prompt_are_taken(puppet_server: PuppetServer, route: str) -> None:
    """However long the prompt takes, the stream is kept open: this client gives up after a minute of silence."""
    path, body = CALLS[route]
    answer = puppet_server.http().post(f"/v1/{path}", json={"model": "puppet", "stream": True, **body})
    found = re.search(r"trace-[0-9a-f]+", answer.raise_for_status().text)
    assert found is not None, answer.text
    (turn,) = puppet_server.http().get(f"/v1/traces/{found[0]}").json()["turns"]
    assert len(turn["prompt"]) > LEAST
