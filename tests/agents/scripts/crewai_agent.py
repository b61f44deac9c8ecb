import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from lookup import lookup as found


@tool("lookup")
def lookup(item: str) -> str:
    """Look an item up."""
    return found(item)


model = LLM(
    model=f"openai/{os.environ['MODEL']}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
clerk = Agent(role="clerk", goal="answer", backstory="a clerk", llm=model, tools=[lookup], verbose=False)
task = Task(description=os.environ["TASK"], expected_output="an answer", agent=clerk)
print(Crew(agents=[clerk], tasks=[task], verbose=False).kickoff())
