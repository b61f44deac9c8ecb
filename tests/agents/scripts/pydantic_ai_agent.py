import os

from lookup import lookup
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(os.environ["MODEL"]), tools=[lookup])
print(agent.run_sync(os.environ["TASK"]).output)
