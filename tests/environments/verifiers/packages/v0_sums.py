"""One turn; weights, and a reward that compares the rollouts of a group if it is asked for."""

import verifiers as vf
from datasets import Dataset


def load_environment(count=8, is_grouped=False):
    rows = [{"question": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(count)]

    async def right(completion, answer):
        return float(answer in completion[-1]["content"])

    def short(completion):
        return float(len(completion[-1]["content"]) < 10)

    def longest(states):
        lengths = [len(state["completion"][-1]["content"]) for state in states]
        return [float(length == max(lengths)) for length in lengths]

    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
    if is_grouped:
        rubric.add_reward_func(longest, weight=0.1)
    kept = {"eval_dataset": Dataset.from_list(rows[:3])} if count > 8 else {}
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric, **kept)
