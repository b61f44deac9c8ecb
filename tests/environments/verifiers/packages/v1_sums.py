"""One turn; two rewards with weights and a metric."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 10)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    count: int = 12
    fails_at: int = -1


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for i in range(self.config.count):
            yield Sum(SumData(id=f"sum-{i}", prompt=f"What is {i} + {i + 1}?", answer=str(2 * i + 1)), self.config.task)


__all__ = ["Sums"]
