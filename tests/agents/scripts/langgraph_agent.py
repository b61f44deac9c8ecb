import os

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from lookup import lookup

agent = create_react_agent(ChatOpenAI(model=os.environ["MODEL"]), [lookup])
print(agent.invoke({"messages": [("user", os.environ["TASK"])]})["messages"][-1].content)
