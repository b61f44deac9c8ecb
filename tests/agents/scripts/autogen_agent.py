import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from lookup import lookup

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}
client = OpenAIChatCompletionClient(model=os.environ["MODEL"], base_url=os.environ["OPENAI_BASE_URL"], model_info=INFO)
agent = AssistantAgent("clerk", model_client=client, tools=[lookup], reflect_on_tool_use=True)
print(asyncio.run(agent.run(task=os.environ["TASK"])).messages[-1].content)
