import os

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from lookup import lookup
from openai import AsyncOpenAI

set_tracing_disabled(True)
agent = Agent(
    name="clerk", tools=[function_tool(lookup)], model=OpenAIResponsesModel(os.environ["MODEL"], AsyncOpenAI())
)
print(Runner.run_sync(agent, os.environ["TASK"]).final_output)
