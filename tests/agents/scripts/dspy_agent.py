import os

import dspy
from lookup import lookup

model = dspy.LM(
    f"openai/{os.environ['MODEL']}",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    cache=False,
    max_tokens=500,
)
dspy.configure(lm=model)
print(dspy.ReAct("question -> answer", tools=[lookup], max_iters=3)(question=os.environ["TASK"]).answer)
