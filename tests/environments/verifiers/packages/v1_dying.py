"""A taskset whose second task ends the process."""

import os

import verifiers.v1 as vf


class Dying(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace) -> float:
        if self.data.idx == 1:
            os._exit(3)
        return 1.0


class DyingTasks(vf.Taskset[Dying, vf.TasksetConfig]):
    def load(self):
        for i in range(3):
            yield Dying(vf.TaskData(prompt=f"What is {i} + 1?"))


__all__ = ["DyingTasks"]
