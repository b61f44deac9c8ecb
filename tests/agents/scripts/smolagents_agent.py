import os

from lookup import lookup
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(
    os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
print(ToolCallingAgent(tools=[tool(lookup)], model=model, verbosity_level=0).run(os.environ["TASK"]))
