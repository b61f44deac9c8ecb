"""Tools of an MCP server, with a state of the rollout that they change and the reward reads."""

import verifiers.v1 as vf


class Tally(vf.State):
    total: int = 0


class Adding(vf.Toolset[vf.ToolsetConfig, Tally]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, number: int) -> str:
        """Adds a number to the total."""
        self.state.total += number
        return f"the total is {self.state.total}"


class TallyConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class TallyData(vf.TaskData):
    goal: int


class TallyTask(vf.Task[TallyData, Tally, TallyConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adding(config.tools)]

    @vf.reward
    async def reached(self, trace) -> float:
        return float(trace.state.total == self.data.goal)


class TallyTasksConfig(vf.TasksetConfig):
    task: TallyConfig = TallyConfig()


class TallyTasks(vf.Taskset[TallyTask, TallyTasksConfig]):
    def load(self):
        for goal in range(2, 6):
            data = TallyData(prompt=f"Make the total {goal}.", system_prompt="Use the tool.", goal=goal)
            yield TallyTask(data, self.config.task)


__all__ = ["TallyTasks"]


if __name__ == "__main__":
    Adding.run()
