"""Several turns with an environment that answers; a row whose reward raises if it is asked for."""

import verifiers as vf
from datasets import Dataset


class Higher(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **more):
        said = str(messages[-1]["content"])
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "no"}]


def load_environment():
    rows = [{"question": "Guess my number, 1 to 6.", "answer": str(i)} for i in range(1, 7)]

    def won(state):
        return float(state.get("final_env_response") is not None) / len(state["trajectory"])

    return Higher(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[won]), max_turns=4)
