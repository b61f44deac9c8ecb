import os

from lookup import lookup
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel

agent = Agent(AnthropicModel(os.environ["MODEL"]), tools=[lookup])
print(agent.run_sync(os.environ["TASK"]).output)
