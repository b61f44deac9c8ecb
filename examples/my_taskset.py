"""A taskset for verifiers (v1): sums, with two rewards."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply.split()[-1:] == [self.data.answer])

    @vf.reward(weight=0.1)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 10)


class SumsConfig(vf.TasksetConfig):
    count: int = 1000


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for i in range(self.config.count):
            a, b = divmod(i * 37 % 2500, 50)
            yield Sum(SumData(id=f"sum-{i}", prompt=f"What is {a} + {b}?", answer=str(a + b)), self.config.task)


__all__ = ["Sums"]
