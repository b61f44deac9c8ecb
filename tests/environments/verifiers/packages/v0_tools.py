"""Tools as functions; with a state of the rollout if it is asked for."""

import json

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Counting(vf.StatefulToolEnv):
    def __init__(self, **more):
        super().__init__(tools=[], max_turns=4, **more)
        self.add_tool(self.count, args_to_skip=["calls"])

    async def setup_state(self, state, **more):
        state["calls"] = []
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **more):
        return {**tool_args, "calls": state["calls"]}

    def count(self, word: str, calls: list) -> str:
        """Counts a word.

        Args:
            word: The word.
        """
        calls.append(word)
        return json.dumps(len(calls))


def load_environment(is_stateful=False):
    rows = [{"question": f"What is {i} + {i + 2}?", "answer": str(2 * i + 2)} for i in range(6)]
    dataset = Dataset.from_list(rows)

    def right(completion, answer):
        return float(answer in str(completion[-1]["content"]))

    def called(state):
        return float(len(state.get("calls") or []))

    if is_stateful:
        return Counting(dataset=dataset, rubric=vf.Rubric(funcs=[called]))
    return vf.ToolEnv(tools=[add], max_turns=3, dataset=dataset, rubric=vf.Rubric(funcs=[right]))
