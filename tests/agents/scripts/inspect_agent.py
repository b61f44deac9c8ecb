import os

from inspect_ai import Task, eval  # noqa: A004 - its name
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool
from lookup import lookup as found


@tool
def lookup() -> Tool:
    async def execute(item: str) -> str:
        """Look an item up.

        Args:
            item: Its name.
        """
        return found(item)

    return execute


task = Task(
    dataset=[Sample(input=os.environ["TASK"], target="inspect")],
    solver=[use_tools(lookup()), generate()],
    scorer=includes(),
)
(log,) = eval(task, model=f"openai/{os.environ['MODEL']}", display="none", log_dir="logs")
assert log.status == "success", log.error
print(log.samples[0].output.completion)
