"""A reward that raises for every second task."""

import verifiers.v1 as vf


class Flaky(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        if self.data.idx % 2:
            raise RuntimeError(f"no grade for {self.data.idx}")
        return 1.0


class FlakyTasks(vf.Taskset[Flaky, vf.TasksetConfig]):
    def load(self):
        for i in range(6):
            yield Flaky(vf.TaskData(prompt=f"What is {i} + 1?"), self.config.task)


__all__ = ["FlakyTasks"]
